package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/tool/supervise"
)

// lastExit returns how a unit ended, in systemctl's terms, with its last error and what the
// administrator's drop-ins set, as the rest of a sentence; empty if it runs or does not exist. The
// lines of fix are to be run before it is started.
func (x *diagnosis) lastExit(ctx context.Context, unit string) (text string, fix []Fix) {
	p := x.show(ctx, unit)
	if p["FreezerState"] == "frozen" {
		return "; " + unit + " is frozen, by systemctl freeze", []Fix{systemctl("thaw", unit)}
	}
	if p == nil || p["LoadState"] == "not-found" || p["ActiveState"] == "active" && p["SubState"] == "running" {
		return "", nil
	}
	text = fmt.Sprintf("; %s is %s (%s)", unit, p["ActiveState"], p["SubState"])
	if how := map[string]string{"1": "exit status", "2": "signal", "3": "signal"}[p["ExecMainCode"]]; how != "" {
		text += fmt.Sprintf(", its last process ended with %s %s at %s", how, p["ExecMainStatus"], cmp.Or(p["ExecMainExitTimestamp"], "an unknown time"))
	}
	gaveUp := p["Result"] == "start-limit-hit"
	if n := p["NRestarts"]; n != "" && n != "0" {
		text += ", restarted " + n + " times"
		if p["ActiveState"] == "failed" {
			gaveUp = true
			text += ": systemd has given up (StartLimitBurst=)"
		}
	}
	if invalid := p["LoadState"]; invalid == "bad-setting" || invalid == "error" {
		text += ", and cannot be loaded (" + invalid + ")"
	}
	if result := p["Result"]; !slices.Contains([]string{"", "success", "exit-code", "signal"}, result) {
		text += ", Result=" + result
	}
	missing, fix := x.missingUnits(ctx, unit, p["Requires"])
	awaited, skip := x.awaited(ctx, unit, p)
	text, fix = text+missing+awaited, append(fix, skip...)
	why := x.lastError(ctx, unit, p)
	if why != "" {
		text += ": " + safetext.Quote(why)
	}
	about := why // systemd does not name that file
	if p["Result"] == "resources" {
		about += " " + p["EnvironmentFiles"]
	}
	wrong, correct := x.obstacles(ctx, unit, about)
	if wrong == "" && why != "" { // an empty file may not be named
		// Nor a program that was not started: journald may not know the unit of the line about it.
		step := map[string]string{"203": "spawning "}[p["ExecMainStatus"]]
		wrong, correct = x.obstacles(ctx, unit, strings.Replace(p["ExecStart"], "path=", "path= "+step, 1))
	}
	text, fix = text+wrong, append(fix, correct...)
	if place := x.inConfig(ctx, p["ExecStart"], why); place != "" && wrong == "" {
		text, fix = text+"; see "+place, append(fix, note("correct %s", place))
	}
	if why != "" || p["Result"] != "success" || p["ActiveState"] == "activating" {
		set, undo := x.dropIns(ctx, unit)
		text, fix = text+set, append(fix, undo...)
	}
	if why != "" && fix == nil {
		fix = []Fix{note("first correct what the last error of %s names", unit)}
	}
	switch {
	case p["UnitFileState"] == "masked-runtime":
		fix = append(fix, run("systemctl", "unmask", "--runtime", unit))
	case p["LoadState"] == "masked":
		fix = append(fix, systemctl("unmask", unit), systemctl("enable", unit))
	case p["ActiveState"] == "inactive" && p["UnitFileState"] == "disabled":
		text += ", and is not enabled"
		fix = append(fix, systemctl("enable", unit))
	case gaveUp:
		fix = append(fix, systemctl("reset-failed", unit))
	}
	return safetext.Clean(text, maxText), fix
}

// advised returns what an error says is wrong, and what to do about it, if the unit may say that.
func (x *diagnosis) advised(ctx context.Context, unit, why string) (text string, fix []Fix) {
	if flag := kernelFlag.FindStringSubmatch(why); flag != nil && unit == x.kubelet.service() {
		name := strings.ReplaceAll(flag[1], "/", ".")
		return "; the kernel has another " + name, []Fix{write("/etc/sysctl.d/90-kubelet-"+name+".conf", name+" = "+flag[2]), run("sysctl", "-w", name+"="+flag[2])}
	}
	if state := oldState.FindStringSubmatch(why); state != nil && unit == x.kubelet.service() {
		return "; " + state[1] + " is of another policy, or damaged", []Fix{note("drain the node, then:"), optional(run("rm", state[1]))}
	}
	if port := portInUse.FindStringSubmatch(why); port != nil {
		if who := x.holder(ctx, port[1]); who.pid > 0 {
			return "; " + who.String() + " listens there", []Fix{note("if that program is not needed:"), optional(who.stop())}
		}
	}
	return "", nil
}

// inConfig returns the line of a YAML file that an error is about, as FILE:LINE: the one that it
// gives, or that of a program's configuration file with the longest word that the error repeats,
// with that word; empty if there is none.
func (x *diagnosis) inConfig(ctx context.Context, execStart, why string) (place string) {
	file := configFlag.FindStringSubmatch(execStart)
	if at := fileLine.FindStringSubmatch(why); at != nil {
		return safetext.ShellWord(at[1]) + ":" + at[2]
	}
	if file == nil {
		return ""
	}
	longest := 7
	for i, line := range strings.Split(string(x.readFile(ctx, file[1])), "\n") {
		for _, w := range configWord.FindAllString(line, -1) {
			if len(w) <= longest || !strings.Contains(why, w) || strings.HasPrefix(line, "kind:") {
				continue
			}
			// A path that exists is right.
			_, target, _ := strings.Cut(w, "/")
			if _, err := x.stat(ctx, filepath.Join("/", x.o.Source.Root, target)); target == "" || err != nil {
				place, longest = fmt.Sprintf("%s:%d, which has %s", safetext.ShellWord(file[1]), i+1, safetext.ShellWord(w)), len(w)
			}
		}
	}
	return place
}

// fileLine matches a file and a line, from 1 on, in a syntax error of the kubelet or of containerd.
var fileLine = regexp.MustCompile(`(/[\w./-]+)[\\"]*,?:? (?:.*yaml: line |\()([0-9]+)[:,] `)

var configFlag = regexp.MustCompile(`--?config[= ]([^ ;]+)`)
var configWord = regexp.MustCompile(`[\w./:-]+[\w]`)

// missingUnits returns the units that a unit requires and that do not exist or are masked, as the
// rest of a sentence, and what to do about them.
func (x *diagnosis) missingUnits(ctx context.Context, unit, requires string) (text string, fix []Fix) {
	for _, required := range elements(requires) {
		p := x.show(ctx, required)
		if p["ActiveState"] == "failed" {
			set, undo := x.dropIns(ctx, required)
			text += ", which requires " + safetext.Word(required) + ", and that has failed: " + safetext.Quote(x.lastError(ctx, required, p)) + set
			fix = slices.Concat(fix, []Fix{logOf(required), note("then correct %s, and run", safetext.ShellWord(required))}, undo, []Fix{systemctl("restart", required)})
		}
		switch p["LoadState"] {
		case "not-found":
			text += ", which requires " + safetext.Word(required) + ": there is no such unit"
			place, _ := x.placeInUnit(ctx, unit, "Requires=")
			if required == controlUnit {
				fix = append(fix, reinstall, run("systemctl", "daemon-reload"))
				continue
			}
			fix = append(fix, note("install what has %s, or take it out of %s", safetext.ShellWord(required), cmp.Or(place, "the unit")), run("systemctl", "daemon-reload"))
		case "masked":
			text += ", which requires " + safetext.Word(required) + ": that is masked"
			fix = append(fix, systemctl("unmask", required))
		}
	}
	return text, fix
}

// awaited returns the units that start, and for which the start of a unit waits, as the rest of a
// sentence, and how to go on without them.
func (x *diagnosis) awaited(ctx context.Context, unit string, p map[string]string) (text string, fix []Fix) {
	if job := p["Job"]; p["ActiveState"] != "inactive" || job == "" || job == "0" {
		return "", nil
	}
	for _, after := range elements(p["After"]) {
		if x.show(ctx, after)["ActiveState"] == "activating" {
			set, undo := x.dropIns(ctx, unit)
			text += ", and its start waits for " + safetext.Word(after) + ", which has not finished its own" + set
			fix = append(append(fix, logOf(after), note("to start without it:"), optional(systemctl("stop", after))), undo...)
		}
	}
	return text, fix
}

// unitFiles returns the files of a unit, of which a later one counts, and then those of its
// environment.
func (x *diagnosis) unitFiles(ctx context.Context, unit string) []string {
	p := x.show(ctx, unit)
	files := elements(p["FragmentPath"] + " " + p["DropInPaths"])
	for line := range strings.Lines(p["EnvironmentFiles"]) {
		file, _, _ := strings.Cut(strings.TrimSpace(line), " (")
		files = append(files, file)
	}
	return files
}

const maxFiles = 50 // files of a unit that are looked at

// filePath matches a path of a file in the text of another one.
var filePath = regexp.MustCompile(`/(?:etc|usr|opt|var/lib)/[\w./@+-]*\w`)

// changed returns which files of a unit, and those that they name, such as its program and that
// program's configuration, changed last, as the rest of a sentence.
func (x *diagnosis) changed(ctx context.Context, unit string) string {
	ctx, cancel := context.WithTimeout(ctx, fileTimeout)
	defer cancel()
	files := append(x.unitFiles(ctx, unit), x.config.Files...)
	times := map[string]int64{}
	for i := 0; i < len(files) && i < maxFiles; i++ {
		at, err := x.stat(ctx, filepath.Join("/", x.o.Source.Root, files[i]))
		if err != nil || !at.IsRegular() {
			continue
		}
		if time.Since(time.Unix(0, at.Changed)) < x.o.Recent {
			times[files[i]] = at.Changed
		}
		if content := x.readFile(ctx, files[i]); !strings.HasPrefix(string(content), "\x7fELF") {
			files = append(files, filePath.FindAllString(string(content), maxFiles)...)
		}
	}
	var shown []string
	for _, file := range slices.SortedFunc(maps.Keys(times), func(a, b string) int { return cmp.Compare(times[b], times[a]) }) {
		shown = append(shown, fmt.Sprintf("%s (%v ago)", safetext.Word(file), time.Since(time.Unix(0, times[file])).Round(time.Second)))
	}
	if len(shown) == 0 {
		return ""
	}
	return "; the files that changed last are " + strings.Join(shown[:min(len(shown), 3)], ", ")
}

// blame returns the last error that a running unit has logged and what the administrator's drop-ins
// set, as the rest of a sentence, and how to take that back.
func (x *diagnosis) blame(ctx context.Context, unit, why string) (text string, fix []Fix) {
	if why = cmp.Or(why, x.ownError(ctx, unit, x.show(ctx, unit)["InvocationID"])); why != "" {
		text = ": " + safetext.Quote(why)
	}
	wrong, fix := x.obstacles(ctx, unit, why)
	set, undo := x.dropIns(ctx, unit)
	return text + wrong + set, append(fix, undo...)
}

// fatal returns the error with which the last process of a unit has ended, while the next one runs;
// empty if there is none.
func (x *diagnosis) fatal(ctx context.Context, unit string) string {
	lines := x.o.Units.Journal(ctx, unit, "--since=-10min", "--lines=200", "--reverse", "--grep="+exited+"|"+errorWords)
	if runs := strings.Split(strings.Join(lines, "\n"), "Main "+exited); len(runs) > 1 {
		return lastOf(unit, strings.Split(runs[1], "\n")[1:], false)
	}
	return ""
}

// noError matches lines that Go prints after the error of a program that crashes, klog's
// information and warnings, and what supervise says of a driver after its own error.
var noError = regexp.MustCompile(`^(\s|goroutine \d|created by |[\w./*()-]+\(.*\)$|[IW][0-9]{4} )|cannot watch process |` +
	regexp.QuoteMeta(supervise.ErrEnded.Error()) + "|" + regexp.QuoteMeta(supervise.ErrNotServing.Error()))

// kernelFlag matches the error of a kubelet with protectKernelDefaults (kubelet v1.37).
var kernelFlag = regexp.MustCompile(`invalid kernel flag: ([a-z_/]+), expected value: ([0-9]+)`)

// oldState matches the error of a kubelet whose cpuManagerPolicy, memoryManagerPolicy or the like
// was changed (kubelet v1.37).
var oldState = regexp.MustCompile(`delete the .* file \\*"(/[\w./-]+)\\*" before restarting`)

// portInUse matches the error of a program whose TCP port another one has.
var portInUse = regexp.MustCompile(`:([0-9]+): bind: address already in use`)

// exited is in systemd's line about the end of a process, and exitLines selects these.
const (
	exited    = "process exited, code="
	exitLines = "--grep=" + exited + "|Failed with result 'timeout'|reached runtime time limit"
)

// lastLine returns the last of some lines in the journal of a unit. systemd repeats that the unit
// failed; the reason is in a line before.
func (x *diagnosis) lastLine(ctx context.Context, unit string, ofSystemd bool, args ...string) string {
	return lastOf(unit, x.o.Units.Journal(ctx, unit, append(args, "--lines=10", "--reverse")...), ofSystemd)
}

func lastOf(unit string, reversed []string, ofSystemd bool) string {
	for _, line := range reversed {
		if line != "" && !strings.HasPrefix(line, "Failed to start ") && !noError.MatchString(line) && (ofSystemd || !strings.HasPrefix(line, unit+": ")) {
			return line
		}
	}
	return ""
}

// ownError returns the last error that a unit has logged itself in the last minutes, or in one run.
func (x *diagnosis) ownError(ctx context.Context, unit, run string) string {
	args := []string{"--since=-10min", "--grep=" + errorWords}
	if run != "" {
		args = append(args, "_SYSTEMD_INVOCATION_ID="+run)
	}
	return x.lastLine(ctx, unit, false, args...)
}

// lastError returns the last error in the journal of a unit with these properties: its own, or
// systemd's if that could not start it; empty if there is none, or if it was stopped.
func (x *diagnosis) lastError(ctx context.Context, unit string, p map[string]string) string {
	status, _ := strconv.Atoi(p["ExecMainStatus"]) // from 200 on it is systemd's
	failed := p["Result"] != "success" && p["Result"] != "" || p["ActiveState"] == "activating"
	if failed && p["LoadState"] == "loaded" && status < 200 {
		own := x.ownError(ctx, unit, p["InvocationID"])
		bySignal := p["ExecMainCode"] == "2" || p["ExecMainCode"] == "3"
		if n := p["NRestarts"]; own == "" && n != "" && n != "0" && !bySignal { // of the run before
			own = x.ownError(ctx, unit, "")
		}
		if own != "" {
			return own
		}
	}
	if failed || p["LoadState"] != "loaded" {
		var run []string // systemd's lines about an earlier one can have another cause
		if id := p["InvocationID"]; id != "" && p["LoadState"] == "loaded" {
			run = []string{"INVOCATION_ID=" + id}
		}
		return cmp.Or(x.lastLine(ctx, unit, true, append(run, "--priority=err")...), x.lastLine(ctx, unit, true, append(run, exitLines)...))
	}
	// What it requires may be missing, which is no result of the unit.
	why := x.lastLine(ctx, unit, true, "--grep=^(Dependency failed for|Started|Stopped) | was skipped because ")
	if strings.HasPrefix(why, "Dependency failed ") || strings.Contains(why, " was skipped because ") {
		return why
	}
	return ""
}
