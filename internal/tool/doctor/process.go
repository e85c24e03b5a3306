package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/cgroup"
	"csi-registrar/internal/node/status"
	sysprocess "csi-registrar/internal/sys/process"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
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
	entries, err := look(ctx, x, x.proc(), func() ([]os.DirEntry, error) { return os.ReadDir(x.proc()) })
	if err != nil {
		return nil, false
	}
	for _, e := range entries {
		pid, _ := strconv.Atoi(e.Name()) // 0, which process refuses, for what is no process
		if p, ok := x.process(ctx, pid); ok {
			all = append(all, p)
		}
		seen = seen || pid == 1 // with hidepid= not even init is visible
	}
	return all, seen
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

// readFile returns the beginning of a file of the node; nil if it cannot be read.
func (x *diagnosis) readFile(ctx context.Context, file string) []byte {
	text, err := look(ctx, x, file, func() ([]byte, error) { return readSome(filepath.Join("/", x.o.Source.Root, file), maxProcFile) })
	if err != nil {
		return nil
	}
	return text
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
	uptime, _ := readSome(filepath.Join(x.proc(), "uptime"), maxProcFile)
	now, _, _ := strings.Cut(string(uptime), " ")
	seconds, err := strconv.ParseFloat(now, 64)
	started := sysprocess.StartTime(x.proc(), pid)
	if err != nil || started == 0 {
		return 0
	}
	const ticks = 100 // a second, on all architectures that Go supports
	return time.Duration((seconds - float64(started)/ticks) * float64(time.Second))
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

// young is for how long a process that systemd has started again and again counts as one that will
// end, too, unless it lives longer than those before it did.
const young = 15 * time.Second

// restarts returns how often systemd has started the unit of a process again that is young or not
// ready for systemd, at the latest when it should have started, with its last error and what the
// administrator's drop-ins set; empty for all others.
func (x *diagnosis) restarts(ctx context.Context, p process, starts time.Duration) (text string, fix []Fix) {
	if !strings.HasSuffix(p.unit, ".service") {
		return "", nil
	}
	ran, unit := x.runsFor(p.pid), x.show(ctx, p.unit)
	n, _ := strconv.Atoi(unit["NRestarts"])
	again := func() time.Duration {
		return time.Duration(max(len(x.o.Units.Journal(ctx, p.unit, "--since=-1min", "--grep=Scheduled restart job")), 1))
	}
	endsSoon := n >= status.ManyRestarts && ran > 0 && ran < young && ran < (time.Minute-ran)/again()
	notReady := unit["ActiveState"] == "activating" && (n > 0 || ran > starts)
	if !endsSoon && !notReady {
		return "", nil
	}
	text = fmt.Sprintf("%s runs for %v", p, ran.Round(time.Second))
	if notReady {
		text += fmt.Sprintf(", systemd waits for the end of its start (%s, Type=%s)", unit["SubState"], unit["Type"])
	}
	text += ", and was restarted " + safetext.Count(n, "time")
	why, fix := x.blame(ctx, p.unit, x.fatal(ctx, p.unit))
	if last := x.lastLine(ctx, p.unit, true, exitLines); last != "" && !strings.HasPrefix(why, ": ") {
		text += ": " + safetext.Quote(last)
	}
	return text + why, fix
}

// runtimeState returns the state of the container runtimes if none of those that are installed
// runs, or if one is frozen, as the rest of a sentence, and what to do about it.
func (x *diagnosis) runtimeState(ctx context.Context) (state string, fix []Fix) {
	for _, r := range x.runtimes {
		s := x.serverOf(ctx, "", r)
		state, fix = state+s.ended, append(fix, s.revive...)
		for _, socket := range x.runtimeSockets(ctx, r) {
			if _, err := x.stat(ctx, socket); !r.confined && errors.Is(err, fs.ErrNotExist) {
				state += "; " + safetext.Word(socket) + " was removed, on which " + r.String() + " listens"
				fix = append(fix, systemctl("restart", r.unit))
			}
		}
	}
	if len(x.runtimes) > 0 {
		return state, fix
	}
	for _, unit := range []string{"containerd.service", "crio.service"} {
		if ended, revive := x.lastExit(ctx, unit); ended != "" {
			state += ended
			fix = append(append(fix, revive...), systemctl("start", unit))
		}
	}
	return state, fix
}

// runtimeSockets returns where a container runtime listens for the kubelet.
func (x *diagnosis) runtimeSockets(ctx context.Context, r process) []string {
	return slices.DeleteFunc(x.listening(ctx, r.pid).paths, func(socket string) bool {
		return path.Base(socket) != "containerd.sock" && path.Base(socket) != "crio.sock"
	})
}
