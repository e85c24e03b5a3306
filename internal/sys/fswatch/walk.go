package fswatch

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
)

const (
	maxLinks  = 40          // symbolic links in one path (path_resolution(7))
	walkLimit = time.Second // how long a walk may take; then its file system hangs

	// A driver's user can change the driver's directory continuously. The first walksAtOnce walks
	// are made at once, then one every walkEvery.
	walksAtOnce = 20
	walkEvery   = 50 * time.Millisecond
)

// calls are the system calls of a walk, besides inotify's, that may hang. Tests replace them.
type calls struct {
	lstat    func(path string, st *unix.Stat_t) error
	readlink func(path string) (string, error)
}

// step is a name in a directory on the way to a path, and the file that was there.
type step struct {
	wd   int32 // -1: the directory cannot be watched
	name string
	seen state
}

// state distinguishes one file from another of the same name. The inode number is not enough: ext4
// reuses that of a removed file for the next one; then the change time differs. The change time is
// left out where normal use changes it: for directories, and for files that are written to.
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

// walkSoon starts a walk of r, and a hint after it if hint is set or the walk finds something new.
// w.mu must be held.
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

// walkWhileNeeded walks until nothing has happened during a walk. The hint comes after the walk, so
// that its receiver sees at least the state that the walk saw.
func (w *Watcher) walkWhileNeeded(ctx context.Context, r *route) {
	for {
		w.mu.Lock()
		if !r.again || r.sub.closed || ctx.Err() != nil {
			r.walking = false
			w.mu.Unlock()
			return
		}
		now := time.Now()
		wait := r.walks.Next(now).Sub(now)
		r.walks.Take(now)
		if wait > 0 {
			w.mu.Unlock()
			rate.Pause(ctx, wait)
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

// walk is one walk. An abandoned walk still takes effect when it returns: its Slot starts no other
// before that.
type walk struct {
	w       *Watcher
	r       *route
	n       notifier // nil: there is none
	steps   []step
	ways    []string
	polled  error // why a directory on the way cannot be watched
	stopped bool  // the Subscription is closed, or inotify was reopened
}

// walk watches the directories on the way to the path, and reports whether anything there changed.
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
	changed := !slices.Equal(before, k.steps)
	unused := w.settle(r, k.steps)
	w.setPolled(r, k.polled)
	r.ways, r.fresh = k.ways, r.fresh || changed
	w.mu.Unlock()
	removeAll(k.n, unused)
	return changed
}

// follow resolves the path step by step. Each directory is watched before a name in it is looked
// up, so any later change causes an event, and that another walk.
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
			k.ways = append(k.ways, at)
			target, err := k.w.calls.readlink(at)
			if links++; err != nil || links > maxLinks {
				return // changed under us, which makes an event; or a loop
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			path = target + "/" + path
		default: // nothing there, or not a directory: nothing can be below
			k.ways = append(k.ways, at)
			if path == "" && k.r.sub.content {
				k.watch(dir, name, watchMask|contentMask)
			}
			return
		}
	}
	k.ways = append(k.ways, dir)
	if k.r.sub.content {
		k.watch(dir, "", watchMask|contentMask)
	}
}

// watch makes the route interested in a name in dir and returns the index of its step: the existing
// one if the path passes there twice, and -1 if there is none.
func (k *walk) watch(dir, name string, mask uint32) int {
	wd, err := k.add(dir, name, mask)
	switch {
	case k.stopped:
		return -1
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return -1 // it vanished: that is an event in the directory above
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

// add watches dir and registers the interest. If the kernel removed a watch in between, that may
// have been this one: then it adds it again.
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
