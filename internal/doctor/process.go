package doctor

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/safetext"
)

// process is a running program, as /proc shows it. All of it but pid and uids is the process's
// choice; unit was checked.
type process struct {
	pid  int
	uids []string // real, effective, saved and file system uid
	comm string
	unit string // the systemd unit that it belongs to; empty if none
}

// processes lists what runs. seen is false if others' processes are hidden.
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
	// With hidepid= not even init is seen.
	return all, slices.Contains(pids, 1)
}

// process reads one; not ok if it is gone or hidden, or does not answer.
func (x *diagnosis) process(ctx context.Context, pid int) (process, bool) {
	dir := x.ofProcess(pid)
	p, err := look(ctx, x, dir, func() (process, error) { return readProcess(dir, pid) })
	return p, err == nil && pid > 0
}

func readProcess(dir string, pid int) (process, error) {
	comm, err := readSome(filepath.Join(dir, "comm"), maxProcFile)
	read := func(name string) string { // what may not be read counts as empty
		data, _ := readSome(filepath.Join(dir, name), maxProcFile)
		return string(data)
	}
	return process{pid: pid, comm: strings.TrimSpace(string(comm)), uids: uidsOf(read("status")), unit: unitOf(read("cgroup"))}, err
}

// maxProcFile is how much of a file in /proc is read, which can be as long as its process likes.
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

// uidsOf finds the uids in /proc/PID/status.
func uidsOf(status string) []string {
	for line := range strings.Lines(status) {
		if uids, ok := strings.CutPrefix(line, "Uid:"); ok {
			return strings.Fields(uids)
		}
	}
	return nil
}

// root reports whether a process is root's: who it is counts, not whose file it runs, so all
// four uids must be 0. (The owner of /proc/PID is root for others' programs, too.)
func (p process) root() bool { return slices.Equal(p.uids, []string{"0", "0", "0", "0"}) }

// unitOf finds the unit in /proc/PID/cgroup: the first component that is one, for below it
// others may make what they like. It is empty for what a user's own service manager runs.
func unitOf(cgroup string) string {
	for line := range strings.Lines(cgroup) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 || (fields[1] != "" && fields[1] != "name=systemd") {
			continue
		}
		for part := range strings.SplitSeq(fields[2], "/") {
			if strings.HasSuffix(part, ".service") || strings.HasSuffix(part, ".scope") {
				if strings.HasPrefix(part, "user@") || !safetext.UnitName(part) {
					break
				}
				return part
			}
		}
	}
	return ""
}

// String names a process for people.
func (p process) String() string {
	s := fmt.Sprintf("%s (pid %d", safetext.Word(p.comm), p.pid)
	if p.unit != "" {
		s += ", " + p.unit
	}
	return s + ")"
}
