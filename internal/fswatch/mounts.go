package fswatch

import (
	"errors"
	"fmt"
	"os"
)

// mounts hints when something was mounted or unmounted in our mount namespace: a mount
// over a folder changes what a path leads to, and inotify does not tell.
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

// run hints until close.
func (m *mounts) run() error {
	raw, err := m.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("cannot watch for mounts: %w", err)
	}
	woken := false
	err = raw.Read(func(uintptr) bool {
		if woken { // the first call comes before any waiting
			select {
			case m.hints <- struct{}{}:
			default:
			}
		}
		woken = true
		return false // go on waiting
	})
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return fmt.Errorf("cannot watch for mounts: %w", err)
}

func (m *mounts) close() error { return m.file.Close() }
