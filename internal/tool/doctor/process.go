package doctor

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/cgroup"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/tool/supervise"
)

// process is a running process, as /proc shows it. A process can choose all values except pid and
// uids; unit, pod and container were validated.
type process struct {
	pid       int
	parent    int      // its pid; 0 if not known
	uids      []string // real, effective, saved and file system uid
	comm      string
	unit      string // the systemd unit that it belongs to; empty if none
	pod       string // the UID of the pod that it belongs to
	container string // and the ID of its container
	inPod     bool   // it runs in a pod, even if pod is empty
	stopped   bool   // by a signal: SIGSTOP
	confined  bool   // its root directory is not the node's, as far as it is known
}

// processes lists the running processes. seen is false if those of other users are hidden.
func (x *diagnosis) processes(ctx context.Context) (all []process, seen bool) {
	pids, err := look(ctx, x, x.proc(), func() (pids []int, err error) {
		entries, err := os.ReadDir(x.proc())
		for _, e := range entries {
			if pid, err := strconv.Atoi(e.Name()); err == nil {
				pids = append(pids, pid)
			}
		}
		return pids, err
	})
	if err != nil {
		return nil, false
	}
	for _, pid := range pids {
		if p, ok := x.process(ctx, pid); ok {
			all = append(all, p)
		}
	}
	// With hidepid= not even init is visible.
	return all, slices.Contains(pids, 1)
}

// process returns one process; not ok if it is gone or hidden.
func (x *diagnosis) process(ctx context.Context, pid int) (process, bool) {
	dir := x.procPath(pid)
	p, err := look(ctx, x, dir, func() (process, error) { return readProcess(x.o.Root, dir, pid) })
	return p, err == nil && pid > 0
}

// readProcess reads dir, a process's directory in /proc; root is the node's root directory.
func readProcess(root, dir string, pid int) (process, error) {
	comm, err := readSome(filepath.Join(dir, "comm"), maxProcFile)
	read := func(name string) string { // a file that cannot be read counts as empty
		data, _ := readSome(filepath.Join(dir, name), maxProcFile)
		return string(data)
	}
	group, proc := read("cgroup"), read("status")
	server := cgroup.Parse(group)
	own, ownErr := unixsock.Stat(filepath.Join(dir, "root"))
	node, nodeErr := unixsock.Stat(root)
	parent, _ := strconv.Atoi(strings.Join(statusOf(proc, "PPid:"), ""))
	return process{pid: pid, parent: parent, comm: strings.TrimSpace(string(comm)), uids: statusOf(proc, "Uid:"),
		stopped: slices.Equal(statusOf(proc, "State:"), []string{"T", "(stopped)"}),
		unit:    server.Unit, pod: server.Pod, container: server.Container, inPod: cgroup.InPod(group),
		confined: ownErr == nil && nodeErr == nil && own.FileID != node.FileID}, err
}

// maxProcFile limits how much of a file in /proc is read: a process can make its files very long.
const maxProcFile = 64 << 10

// readSome reads the first bytes of a file.
func readSome(file string, limit int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// statusOf returns the words of a line in /proc/PID/status.
func statusOf(status, name string) []string {
	for line := range strings.Lines(status) {
		if words, ok := strings.CutPrefix(line, name); ok {
			return strings.Fields(words)
		}
	}
	return nil
}

// runsFor returns how long a process has run; 0 if that is not known.
func (x *diagnosis) runsFor(pid int) time.Duration {
	stat, _ := readSome(x.procPath(pid, "stat"), maxProcFile)
	uptime, _ := readSome(filepath.Join(x.proc(), "uptime"), maxProcFile)
	// Its name, in parentheses, can contain anything (proc_pid_stat(5)); starttime is field 22.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	now, _, _ := strings.Cut(string(uptime), " ")
	seconds, err := strconv.ParseFloat(now, 64)
	if err != nil || len(fields) < 20 {
		return 0
	}
	const ticks = 100 // a second, on all architectures that Go supports
	started, _ := strconv.ParseFloat(fields[19], 64)
	return time.Duration((seconds - started/ticks) * float64(time.Second))
}

// root reports whether a process runs as root: all four uids must be 0. (The owner of /proc/PID
// is root for some processes of other users, too.)
func (p process) root() bool { return slices.Equal(p.uids, []string{"0", "0", "0", "0"}) }

// String names a process for people.
func (p process) String() string {
	s := fmt.Sprintf("%s (pid %d", safetext.Word(p.comm), p.pid)
	if p.unit != "" {
		s += ", " + p.unit
	}
	return s + ")"
}

// execPath matches the program in ExecStart= as systemctl show prints it.
var execPath = regexp.MustCompile(`^{ path=([^ ;]+) ;`)

// lastExit returns how a unit ended, in systemctl's terms, with its last error and what the
// administrator's drop-ins set, as the rest of a sentence; empty if it runs or does not exist. The
// lines of fix are to be run before it is started.
func (x *diagnosis) lastExit(ctx context.Context, unit string) (text string, fix []Fix) {
	p := x.show(ctx, unit, "LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "ExecMainExitTimestamp", "NRestarts", "UnitFileState", "FreezerState", "Requires", "ExecStart")
	if p["FreezerState"] == "frozen" {
		return "; " + unit + " is frozen, by systemctl freeze", []Fix{systemctl("thaw", unit)}
	}
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
	text += missing
	if program := execPath.FindStringSubmatch(p["ExecStart"]); p["ExecMainStatus"] == "203" && program != nil {
		place, _ := x.placeInUnit(ctx, unit, program[1])
		fix = append(fix, x.executable(ctx, program[1], cmp.Or(place, "the unit")))
	}
	why := x.lastError(ctx, unit, p)
	if why != "" {
		text += ": " + safetext.Quote(why)
	}
	if port := portInUse.FindStringSubmatch(why); port != nil {
		if who, stop, _ := x.holder(ctx, port[1]); who.pid > 0 {
			text, fix = text+"; "+who.String()+" listens there", append(fix, note("if that program is not needed: %s", stop))
		}
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

// missingUnits returns the units that a unit requires and that do not exist or are masked, as the
// rest of a sentence, and what to do about them.
func (x *diagnosis) missingUnits(ctx context.Context, unit, requires string) (text string, fix []Fix) {
	for required := range strings.FieldsSeq(requires) {
		switch x.show(ctx, required, "LoadState")["LoadState"] {
		case "not-found":
			text += ", which requires " + safetext.Word(required) + ": there is no such unit"
			place, _ := x.placeInUnit(ctx, unit, required)
			fix = append(fix, note("install what has %s, or take it out of %s", safetext.ShellWord(required), cmp.Or(place, "the unit")))
		case "masked":
			text += ", which requires " + safetext.Word(required) + ": that is masked"
			fix = append(fix, systemctl("unmask", required))
		}
	}
	return text, fix
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
	run := x.show(ctx, unit, "InvocationID")["InvocationID"]
	if why := x.lastError(ctx, unit, map[string]string{"LoadState": "loaded", "Result": "exit-code", "InvocationID": run}); why != "" {
		text = ": " + safetext.Quote(why)
	}
	set, fix := x.dropIns(ctx, unit)
	return text + set, fix
}

// ofSupervise reports whether a line repeats what supervise says of a driver, after its own error.
func ofSupervise(line string) bool {
	return strings.Contains(line, supervise.ErrEnded.Error()) || strings.Contains(line, supervise.ErrNotServing.Error())
}

// noError matches lines that Go prints after the error of a program that crashes, and klog's
// information and warnings.
var noError = regexp.MustCompile(`^(\s|goroutine \d|created by |[\w./*()-]+\(.*\)$|[IW][0-9]{4} )`)

// portInUse matches the error of a program whose TCP port another one has.
var portInUse = regexp.MustCompile(`:([0-9]+): bind: address already in use`)

// lastError returns the last error in the journal of a unit with these properties: its own, or
// systemd's if that could not start it; empty if there is none, or if it was stopped.
func (x *diagnosis) lastError(ctx context.Context, unit string, p map[string]string) string {
	status, _ := strconv.Atoi(p["ExecMainStatus"]) // from 200 on it is systemd's
	failed := p["Result"] != "success" && p["Result"] != "" || p["ActiveState"] == "activating"
	// systemd repeats that the unit failed; the reason is in a line before.
	last := func(ofSystemd bool, args ...string) string {
		for _, line := range x.o.Units.Journal(ctx, unit, append(args, "--lines=10", "--reverse")...) {
			if line != "" && !strings.HasPrefix(line, "Failed to start ") && !ofSupervise(line) && !noError.MatchString(line) && (ofSystemd || !strings.HasPrefix(line, unit+": ")) {
				return line
			}
		}
		return ""
	}
	if failed && p["LoadState"] == "loaded" && status < 200 {
		args := []string{"--since=-10min", "--grep=" + errorWords}
		if run := p["InvocationID"]; run != "" {
			args = append(args, "_SYSTEMD_INVOCATION_ID="+run)
		}
		if own := last(false, args...); own != "" || p["InvocationID"] != "" {
			return own
		}
	}
	if failed || p["LoadState"] != "loaded" {
		return last(true, "--priority=err")
	}
	// What it requires may be missing, which is no result of the unit.
	why := last(true, "--grep=^(Dependency failed for|Started|Stopped) | was skipped because ")
	if strings.HasPrefix(why, "Dependency failed ") || strings.Contains(why, " was skipped because ") {
		return why
	}
	return ""
}
