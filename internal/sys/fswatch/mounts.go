package fswatch

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"csi-registrar/internal/sys/mountinfo"
)

// lookAtMounts starts walks of the paths on whose way something was mounted or unmounted since the
// last call. A path that is being walked counts as well: the walk may have passed there before. So
// does a path that changed since: after an unmount and a new mount it can look the same here,
// because the kernel reuses the numbers.
func (w *Watcher) lookAtMounts(ctx context.Context) {
	w.mu.Lock()
	onTheWay := map[string]bool{"/": true}
	for r := range w.routes {
		for _, way := range r.ways {
			for dir := way; !onTheWay[dir]; dir = filepath.Dir(dir) {
				onTheWay[dir] = true
			}
		}
	}
	w.mu.Unlock()
	all, err := mountinfo.Read("/proc", "self")
	if err != nil {
		w.log.Debug("cannot read the mounts", "error", err)
		w.look(ctx, nil, false)
		return
	}
	now := map[string][]mountinfo.Mount{} // by mount point
	for _, m := range all {
		if onTheWay[m.Point] {
			now[m.Point] = append(now[m.Point], m)
		}
	}
	changed := map[string]bool{}
	for point := range onTheWay {
		changed[point] = !slices.Equal(now[point], w.mounts[point])
	}
	w.mounts = now
	w.look(ctx, func(r *route) bool {
		fresh := r.fresh
		r.fresh = false
		return fresh || r.walking || r.ways == nil || slices.ContainsFunc(r.ways, func(way string) bool {
			for dir := way; !changed[dir]; dir = filepath.Dir(dir) {
				if dir == "/" {
					return false
				}
			}
			return true
		})
	}, false)
}

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
