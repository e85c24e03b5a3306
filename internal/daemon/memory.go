package daemon

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
)

const (
	settled   = 5 * time.Second // without any change: the burst is over
	tidyAgain = time.Minute     // between two, so that a driver which flaps does not make us collect for ever
)

// tidyMemory gives what a burst needed (a start, a storm of drivers) back to the node once
// things have settled. The runtime would keep it for minutes: the memory belongs to the
// workloads. It costs a garbage collection and no timer while nothing changes.
func (d *daemon) tidyMemory(ctx context.Context) {
	for {
		changed := d.agent.Changed()
		select {
		case <-ctx.Done():
			return
		case <-changed:
			continue
		case <-time.After(settled):
		}
		// Who still waits for a driver is to be quick when it comes.
		waits := slices.ContainsFunc(d.agent.Status().Pending(), func(s status.Driver) bool { return s.Driver != status.Ready })
		debug.FreeOSMemory()
		if !waits {
			if err := unmapProgram(); err != nil {
				d.log.Debug("the program's pages stay mapped", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(tidyAgain):
		}
	}
}

// unmapProgram takes the program's own code and constants out of the process, and marks
// them as the first to go when the node is short of memory. They stay in the page cache,
// clean and nobody's working set: what is needed again is mapped again by page faults, some
// dozens at the next event. A daemon that waits for months needs little of the 11 MB that
// its start went through, and the kernel, which maps a file in large pieces and protects code
// that ran once, would take long to find out.
func unmapProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return err
	}
	var errs []error
	for from, to := range unchanged(string(smaps), program) {
		for _, advice := range []uintptr{unix.MADV_COLD, unix.MADV_DONTNEED} {
			if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, advice); errno != 0 {
				errs = append(errs, fmt.Errorf("madvise %d: %w", advice, errno))
			}
		}
	}
	return errors.Join(errs...)
}

// unchanged finds the mappings of a file that cannot be written to and hold nothing but
// what is in the file: a page with a debugger's breakpoint, or with the relocations of
// another kind of build, would be lost, so a mapping with any is left out.
func unchanged(smaps, file string) iter.Seq2[uintptr, uintptr] {
	tail := " " + file + "\n"
	return func(yield func(from, to uintptr) bool) {
		var from, to uintptr // of the mapping whose fields are read; to is 0 where it is none of these
		for line := range strings.Lines(smaps) {
			anonymous, found := strings.CutPrefix(line, "Anonymous:")
			switch isField := line[0] >= 'A' && line[0] <= 'Z'; {
			case found && to != 0:
				if strings.TrimSpace(anonymous) == "0 kB" && !yield(from, to) {
					return
				}
			case !isField:
				var mode string
				from, to = 0, 0
				if !strings.HasSuffix(line, tail) {
					continue
				}
				n, _ := fmt.Sscanf(line, "%x-%x %4s", &from, &to, &mode)
				if n != 3 || mode != "r-xp" && mode != "r--p" {
					to = 0
				}
			}
		}
	}
}
