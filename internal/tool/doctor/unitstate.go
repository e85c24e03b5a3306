package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// lastExit returns how a unit ended, in systemctl's terms, with its last error and what the
// administrator's drop-ins set, as the rest of a sentence; empty if it runs or does not exist. The
// lines of fix are to be run before it is started.
func (x *diagnosis) lastExit(ctx context.Context, unit string) (text string, fix []Fix) {
	p := x.show(ctx, unit, "LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "ExecMainExitTimestamp", "NRestarts", "UnitFileState")
	if p == nil || p["LoadState"] == "not-found" || p["ActiveState"] == "active" && p["SubState"] == "running" {
		return "", nil
	}
	text = fmt.Sprintf("; %s is %s (%s)", unit, p["ActiveState"], p["SubState"])
	how := map[string]string{"1": "exit status", "2": "signal", "3": "signal"}[p["ExecMainCode"]]
	if how != "" {
		text += fmt.Sprintf(", its last process ended with %s %s", how, p["ExecMainStatus"])
		if at := p["ExecMainExitTimestamp"]; at != "" {
			text += " at " + at
		}
	}
	if n := p["NRestarts"]; n != "" && n != "0" {
		text += ", restarted " + n + " times"
	}
	if invalid := p["LoadState"]; invalid == "bad-setting" || invalid == "error" {
		text += ", and cannot be loaded (" + invalid + ")"
	}
	if result := p["Result"]; !slices.Contains([]string{"", "success", "exit-code", "signal"}, result) {
		text += ", Result=" + result
	}
	why := x.lastError(ctx, unit, p)
	if why != "" {
		text += ": " + safetext.Quote(why)
	}
	if why != "" || p["Result"] != "success" || p["ActiveState"] == "activating" {
		set, undo := x.dropIns(ctx, unit)
		text, fix = text+set, undo
	}
	switch {
	case p["UnitFileState"] == "masked-runtime":
		fix = append(fix, run("systemctl", "unmask", "--runtime", unit))
	case p["LoadState"] == "masked":
		fix = append(fix, systemctl("unmask", unit), systemctl("enable", unit))
	case p["ActiveState"] == "inactive" && p["UnitFileState"] == "disabled":
		text += ", and is not enabled"
		fix = append(fix, systemctl("enable", unit))
	case p["Result"] == "start-limit-hit":
		fix = append(fix, systemctl("reset-failed", unit))
	}
	return safetext.Clean(text, maxText), fix
}

// young is for how long a process that systemd has started again and again counts as one that will
// end, too.
const young = 15 * time.Second

// restarts returns how often systemd has started the unit of a process again that is young or has
// not reported that it is ready, with its last error and what the administrator's drop-ins set;
// empty for all others.
func (x *diagnosis) restarts(ctx context.Context, p process) (text string, fix []Fix) {
	if !strings.HasSuffix(p.unit, ".service") {
		return "", nil
	}
	ran, unit := x.runsFor(p.pid), x.show(ctx, p.unit, "NRestarts", "ActiveState")
	n, _ := strconv.Atoi(unit["NRestarts"])
	endsSoon := n >= status.ManyRestarts && ran > 0 && ran < young
	if notReady := n > 0 && unit["ActiveState"] == "activating"; !endsSoon && !notReady {
		return "", nil
	}
	why, fix := x.blame(ctx, p.unit)
	return fmt.Sprintf("%s runs for %v, and was restarted %s", p, ran.Round(time.Second), count(n, "time")) + why, fix
}

// blame returns the last error that a running unit has logged and what the administrator's drop-ins
// set, as the rest of a sentence, and how to take that back.
func (x *diagnosis) blame(ctx context.Context, unit string) (text string, fix []Fix) {
	if why := x.lastError(ctx, unit, map[string]string{"LoadState": "loaded", "Result": "exit-code"}); why != "" {
		text = ": " + safetext.Quote(why)
	}
	set, fix := x.dropIns(ctx, unit)
	return text + set, fix
}

// lastError returns the last error in the journal of a unit with these properties: its own, or
// systemd's if that could not start it; empty if there is none, or if it was stopped.
func (x *diagnosis) lastError(ctx context.Context, unit string, p map[string]string) string {
	status, _ := strconv.Atoi(p["ExecMainStatus"]) // from 200 on it is systemd's
	failed := p["Result"] != "success" && p["Result"] != ""
	// systemd repeats that the unit failed; the reason is in a line before.
	last := func(ofSystemd bool, args ...string) string {
		for _, line := range x.o.Units.Journal(ctx, unit, append(args, "--lines=10", "--reverse")...) {
			if line != "" && !strings.HasPrefix(line, "Failed to start ") && (ofSystemd || !strings.HasPrefix(line, unit+": ")) {
				return line
			}
		}
		return ""
	}
	if failed && p["LoadState"] == "loaded" && status < 200 {
		if own := last(false, "--since=-10min", "--grep="+errorWords); own != "" {
			return own
		}
	}
	if failed || p["LoadState"] != "loaded" {
		return last(true, "--priority=err")
	}
	// What it requires may be missing, which is no result of the unit.
	if why := last(true, "--grep=^(Dependency failed for|Started|Stopped) "); strings.HasPrefix(why, "Dependency failed ") {
		return why
	}
	return ""
}

// dropIns returns what the administrator's drop-ins of a unit set, as the rest of a sentence, and
// how to take that back.
func (x *diagnosis) dropIns(ctx context.Context, unit string) (set string, fix []Fix) {
	for _, file := range strings.Fields(x.show(ctx, unit, "DropInPaths")["DropInPaths"]) {
		text, err := look(ctx, x, file, func() ([]byte, error) { return readSome(filepath.Join("/", x.o.Source.Root, file), maxProcFile) })
		if err != nil || strings.HasPrefix(file, "/usr/lib/") { // of a package
			continue
		}
		var directives []string
		for line := range strings.Lines(string(text)) {
			if line = strings.TrimSpace(line); line != "" && !strings.ContainsAny(line[:1], "#;[") {
				directives = append(directives, line)
			}
		}
		set += "; " + safetext.Word(file) + " sets " + safetext.Quote(strings.Join(directives, " "))
		fix = append(fix, note("if that is the cause, correct or remove %s", safetext.ShellWord(file)))
	}
	if len(fix) > 0 {
		fix = append(fix, run("systemctl", "daemon-reload"))
	}
	return set, fix
}
