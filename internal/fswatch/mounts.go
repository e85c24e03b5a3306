package fswatch

import (
	"context"
	"fmt"
	"os"
	"time"
)

// watchMounts hints when something was mounted or unmounted in our mount namespace, until ctx is
// done: a mount over a directory changes what a path resolves to, which inotify does not report.
//
// The kernel reports a change as an error condition on /proc/self/mountinfo (proc(5),
// poll). Go's poller waits edge-triggered, and each mount is an edge; nothing is read.
func watchMounts(ctx context.Context, hints chan<- struct{}) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("cannot watch for mounts: %w", err)
	}
	defer f.Close()
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })() // fails only on a closed file
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Read(func(uintptr) bool {
			// Also before the first wait: for what came before the file was opened.
			select {
			case hints <- struct{}{}:
			default:
			}
			return false // go on waiting
		})
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("cannot watch for mounts: %w", err)
}
