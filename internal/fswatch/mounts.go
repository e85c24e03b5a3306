package fswatch

import (
	"context"
	"fmt"
	"os"
)

// mounts hints when something was mounted or unmounted in our mount namespace: a mount
// over a directory changes what a path leads to, and inotify does not tell.
//
// The kernel reports a change as an error condition on /proc/self/mountinfo (proc(5),
// poll). Go's poller waits edge-triggered, and each mount is an edge; nothing is read.
type mounts struct {
	file  *os.File
	hints chan struct{} // capacity one
}

func openMounts() (*mounts, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("cannot watch for mounts: %w", err)
	}
	return &mounts{file: f, hints: make(chan struct{}, 1)}, nil
}

// run hints until close, which comes after ctx is done.
func (m *mounts) run(ctx context.Context) error {
	raw, err := m.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("cannot watch for mounts: %w", err)
	}
	err = raw.Read(func(uintptr) bool {
		// Also before the first wait, which forgets what came since the file was opened.
		select {
		case m.hints <- struct{}{}:
		default:
		}
		return false // go on waiting
	})
	if ctx.Err() != nil {
		return nil // closed
	}
	return fmt.Errorf("cannot watch for mounts: %w", err)
}

func (m *mounts) close() error {
	if m.file == nil {
		return nil
	}
	return m.file.Close()
}
