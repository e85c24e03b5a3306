package fswatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/rate"
)

// notifier is the part of inotify that the Watcher uses. Tests replace it with one that reaches its
// limits.
type notifier interface {
	// add watches a directory, or more events of it, and returns the watch descriptor: the same
	// one for the same directory under any name. It may hang with the file system.
	add(dir string, mask uint32) (int32, error)
	remove(wd int32)
	// read waits for events. It ends with os.ErrClosed after close.
	read(buf []byte) (int, error)
	close() error
}

// fsnotify was tried and is not sufficient: it cannot leave out IN_MODIFY, so every write to a file
// in /run or /tmp would wake the daemon, and it identifies directories by name, but symbolic links,
// bind mounts and recreated directories need the watch descriptor.
const (
	watchMask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF |
		// DONT_FOLLOW, because a link may have replaced the directory that was walked. MASK_ADD,
		// because subscriptions to different events may watch one directory under two names.
		unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW | unix.IN_MASK_ADD
	contentMask = unix.IN_CLOSE_WRITE
)

type inotify struct {
	fd   int
	file *os.File // owns fd and adds it to Go's poller
}

func openInotify() (notifier, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("cannot open inotify: %w", err)
	}
	return &inotify{fd: fd, file: os.NewFile(uintptr(fd), "inotify")}, nil
}

// add uses the number of the descriptor, because it may hang with the file system and must not
// keep close from closing it. At worst the number belongs to the next instance by then, which gets
// a watch that nobody asked for.
func (i *inotify) add(dir string, mask uint32) (int32, error) {
	wd, err := unix.InotifyAddWatch(i.fd, dir, mask)
	return int32(wd), err
}

func (i *inotify) remove(wd int32) {
	// EINVAL, the only possible error, means that the kernel has already removed it.
	_, _ = unix.InotifyRmWatch(i.fd, uint32(wd))
}

func (i *inotify) read(buf []byte) (int, error) { return i.file.Read(buf) }
func (i *inotify) close() error                 { return i.file.Close() }

// whyPolled describes why a directory cannot be watched, and the fix.
func whyPolled(dir string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return errors.New("the limit of inotify watches is reached: raise the sysctl fs.inotify.max_user_watches")
	case errors.Is(err, unix.EMFILE):
		return errors.New("the limit of inotify instances, or that of open files, is reached: raise the sysctl fs.inotify.max_user_instances (or LimitNOFILE= of the service)")
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("no permission to read the directory %q: make it readable for the user that the daemon runs as", dir)
	}
	return fmt.Errorf("cannot watch %q: %w", dir, err)
}

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
			rate.Hint(hints)
			return false // wait again
		})
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("cannot watch for mounts: %w", err)
}
