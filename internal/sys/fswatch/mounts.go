package fswatch

import (
	"context"
	"fmt"
	"os"
	"time"
)

// WatchMounts gives a hint when something was mounted or unmounted, until ctx is done: a mount
// over a directory changes what a path resolves to, which inotify does not report. The file is the
// mountinfo of a process in the mount namespace in question.
//
// The kernel reports a change as an error condition on it (proc_pid_mountinfo(5)). Go's poller is
// edge-triggered, and each mount is an edge; nothing is read.
func WatchMounts(ctx context.Context, mountinfo string, hints chan<- struct{}) error {
	f, err := os.Open(mountinfo)
	if err != nil {
		return fmt.Errorf("cannot watch for mounts: %w", err)
	}
	defer f.Close()
	// SetReadDeadline fails only on a closed file.
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })()
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Read(func(uintptr) bool {
			// Also before the first wait, for changes before the file was opened.
			select {
			case hints <- struct{}{}:
			default:
			}
			return false // wait again
		})
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("cannot watch for mounts: %w", err)
}
