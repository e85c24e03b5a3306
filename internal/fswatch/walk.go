package fswatch

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/worker"
)

const (
	maxLinks  = 40          // how many symbolic links the kernel follows in one path (path_resolution(7))
	walkLimit = time.Second // how long a walk may take; then its file system hangs

	// A driver's user can change the driver's directory all the time. That many walks are made
	// at once, then one every walkEvery.
	walksAtOnce = 20
	walkEvery   = 50 * time.Millisecond
)

// pace lets a burst through, and then one every while. The zero value is ready.
type pace struct{ until time.Time }

// wait counts one, and returns for how long it is to wait; no longer than zero: not at all.
func (p *pace) wait(now time.Time, burst int, every time.Duration) time.Duration {
	if p.until.Before(now) {
		p.until = now
	}
	p.until = p.until.Add(every)
	return p.until.Sub(now) - time.Duration(burst)*every
}

// calls are the system calls of a walk that may hang, beside inotify's. Tests replace them.
type calls struct {
	lstat    func(path string, st *unix.Stat_t) error
	readlink func(path string) (string, error)
}

// step is a name in a directory on the way to a path, and what was there.
type step struct {
	wd   int32 // -1: the directory cannot be watched
	name string
	seen state
}

// state is what distinguishes one file from another at the same name. The inode number alone does
// not: ext4 gives that of a removed file to the next one; then the change time differs. It
// is left out where it also changes by use: directories, and files that are written to.
type state struct {
	errno          unix.Errno // ENOENT, usually; the rest is zero then
	dev, ino       uint64
	mode, uid, gid uint32
	ctime          int64
}

func (s state) kind() uint32 { return s.mode & unix.S_IFMT }

func (c calls) look(path string) (s state) {
	var st unix.Stat_t
	if err := c.lstat(path, &st); err != nil {
		if !errors.As(err, &s.errno) {
			s.errno = unix.EIO
		}
		return s
	}
	s = state{dev: st.Dev, ino: st.Ino, mode: st.Mode, uid: st.Uid, gid: st.Gid}
	if s.kind() == unix.S_IFSOCK || s.kind() == unix.S_IFLNK {
		s.ctime = st.Ctim.Nano()
	}
	return s
}

// walkSoon has r walked, and its holder hinted after that if hint is set or the walk finds
// something new. w.mu is held.
func (w *Watcher) walkSoon(r *route, hint bool) {
	if r.sub.closed || w.ctx == nil {
		return
	}
	r.again, r.hint = true, r.hint || hint
	if !r.walking {
		r.walking = true
		ctx := w.ctx
		w.tasks.Go(func() { w.walkWhileNeeded(ctx, r) })
	}
}

// walkWhileNeeded walks, and again if something happened meanwhile. The hint comes after the
// walk, so whoever looks because of it sees at least what the walk saw.
func (w *Watcher) walkWhileNeeded(ctx context.Context, r *route) {
	for {
		w.mu.Lock()
		if !r.again || r.sub.closed || ctx.Err() != nil {
			r.walking = false
			w.mu.Unlock()
			return
		}
		if wait := r.pace.wait(time.Now(), walksAtOnce, walkEvery); wait > 0 {
			w.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-time.After(wait):
			}
			w.mu.Lock()
		}
		hint := r.hint
		r.again, r.hint = false, false
		w.mu.Unlock()

		changed, err := worker.Do(ctx, r.slot, walkLimit, func() bool { return w.walk(r) }, nil)
		w.mu.Lock()
		changed = changed || r.hanging != (err != nil)
		r.hanging = err != nil
		closed := r.sub.closed
		w.mu.Unlock()
		if (hint || changed) && !closed {
			r.sub.Hint()
		}
	}
}

// walk is one walk. An abandoned one still counts when it returns: until then its Slot lets no
// other begin.
type walk struct {
	w       *Watcher
	r       *route
	n       notifier // nil: there is none
	steps   []step
	polled  error // why a directory on the way cannot be watched
	stopped bool  // the Subscription is closed, or inotify another
}

// walk watches what is on the way to the path, and reports whether that has changed.
func (w *Watcher) walk(r *route) bool {
	w.mu.Lock()
	k := &walk{w: w, r: r, n: w.inotify}
	before := slices.Clone(r.steps)
	w.mu.Unlock()
	k.follow()

	w.mu.Lock()
	if k.stopped || r.sub.closed || w.inotify != k.n {
		w.mu.Unlock()
		return false
	}
	unused := w.settle(r, k.steps)
	w.setPolled(r, k.polled)
	w.mu.Unlock()
	removeAll(k.n, unused)
	return !slices.Equal(before, k.steps)
}

// follow goes along the path. Each directory is watched before it is looked into, so whatever
// changes after a look makes an event, and that another walk.
func (k *walk) follow() {
	dir, path, links := "/", k.r.path, 0
	for path != "" && !k.stopped {
		var name string
		name, path, _ = strings.Cut(path, "/")
		switch name {
		case "", ".":
			continue
		case "..": // in a link's target; dir is real, so its parent is its path's
			dir = filepath.Dir(dir)
			continue
		}
		at := filepath.Join(dir, name)
		i := k.watch(dir, name, watchMask)
		seen := k.w.calls.look(at)
		if i >= 0 {
			k.steps[i].seen = seen
		}
		switch seen.kind() {
		case unix.S_IFDIR:
			dir = at
		case unix.S_IFLNK:
			target, err := k.w.calls.readlink(at)
			if links++; err != nil || links > maxLinks {
				return // changed under us, which makes an event; or a loop
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			path = target + "/" + path
		default: // nothing there, or no directory: there can be nothing below
			if path == "" && k.r.sub.content {
				k.watch(dir, name, watchMask|contentMask)
			}
			return
		}
	}
	if k.r.sub.content {
		k.watch(dir, "", watchMask|contentMask)
	}
}

// watch makes the route interested in a name in dir, and returns the number of its step: the
// old one if the way leads there twice, and -1 if there is none.
func (k *walk) watch(dir, name string, mask uint32) int {
	wd, err := k.add(dir, name, mask)
	switch {
	case k.stopped:
		return -1
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return -1 // it vanished, which is an event in the directory above
	case err != nil:
		wd = -1
		if k.polled == nil {
			k.polled = whyPolled(dir, err)
		}
	}
	if i := slices.IndexFunc(k.steps, func(s step) bool { return wd >= 0 && s.wd == wd && s.name == name }); i >= 0 {
		return i
	}
	k.steps = append(k.steps, step{wd: wd, name: name})
	return len(k.steps) - 1
}

// add watches dir and registers the interest. If the kernel removed a watch in between, it may
// have been this one: then it is added again.
func (k *walk) add(dir, name string, mask uint32) (int32, error) {
	w := k.w
	for {
		w.mu.Lock()
		k.stopped = k.r.sub.closed || w.inotify != k.n
		ignored, none := w.ignored, w.noInotify
		w.mu.Unlock()
		if k.stopped || k.n == nil {
			return -1, none
		}
		wd, err := k.n.add(dir, mask)
		if err != nil {
			return -1, err
		}
		w.mu.Lock()
		k.stopped = k.r.sub.closed || w.inotify != k.n
		unchanged := w.ignored == ignored
		if !k.stopped && unchanged {
			w.register(k.r, wd, name)
		}
		unneeded := k.stopped && w.watches[wd] == nil
		w.mu.Unlock()
		switch {
		case unneeded:
			k.n.remove(wd)
			return -1, nil
		case k.stopped, unchanged:
			return wd, nil
		}
	}
}

func removeAll(n notifier, wds []int32) {
	for _, wd := range wds {
		if n != nil {
			n.remove(wd)
		}
	}
}
