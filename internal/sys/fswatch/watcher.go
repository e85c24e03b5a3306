// Package fswatch gives hints that something changed at a path, which need not exist yet: from
// inotify, and from looking every 5 minutes as a fallback. A hint has no payload; the receiver
// re-reads the state.
//
// A file system that hangs under one path does not affect the others: each path is walked in a
// separate goroutine, by the worker package, and no system call that may wait for a file system is
// made under the Watcher's lock.
package fswatch

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
)

// mountPause is the minimum time between two looks because of mounts: starting pods mounts dozens
// of file systems at once.
const mountPause = 100 * time.Millisecond

// An endless stream of events, which a driver's user can cause in the driver's directory, is read
// in batches: after readsAtOnce, one read every readEvery. The buffer is large enough for the
// events that arrive meanwhile: an overflow of the kernel's queue costs a walk of every path.
const (
	readsAtOnce = 100
	readEvery   = 10 * time.Millisecond
	readBuffer  = 64 << 10 // an event takes 16 bytes and its name
)

// Watcher watches the directories on the way to many paths with one inotify instance, one watch
// per directory, and one timer. An event wakes only the subscriptions whose path has the name.
type Watcher struct {
	log  *slog.Logger
	pool *worker.Pool // of calls that may hang

	// Tests replace these four.
	slowLook     time.Duration // how often to look without an event
	pollInterval time.Duration // how often to look at directories that inotify cannot watch
	open         func() (notifier, error)
	calls        calls

	kick chan struct{} // capacity one: the reason for polling has changed

	mu        sync.Mutex      // held only for access to memory
	ctx       context.Context // of Run, for the walks; nil: not running
	routes    map[*route]struct{}
	polled    map[*route]error // those with a directory that cannot be watched
	reason    string           // one of polled; empty: none
	watches   map[int32]watch
	inotify   notifier
	noInotify error                        // why inotify is nil
	mounts    map[string][]mountinfo.Mount // on the way to a path, by mount point; for loop only
	ignored   uint64                       // how many watches the kernel has removed
	tasks     sync.WaitGroup
}

// New returns a Watcher. It watches while Run runs.
func New(log *slog.Logger, pool *worker.Pool) *Watcher {
	return &Watcher{
		log: log, pool: pool,
		slowLook: 5 * time.Minute, pollInterval: time.Second,
		open: openInotify, calls: calls{lstat: unix.Lstat, readlink: os.Readlink},
		kick:   make(chan struct{}, 1),
		routes: make(map[*route]struct{}), polled: make(map[*route]error), watches: make(map[int32]watch),
	}
}

// Polling returns why changes are polled each second instead of being reported by the
// kernel, and the fix; empty if they are not.
func (w *Watcher) Polling() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reason
}

// Run watches until ctx is done and returns when everything but hanging walks is released. Paths
// that cannot be watched are polled. Call it once.
func (w *Watcher) Run(ctx context.Context) error {
	w.look(ctx, nil, true)
	mounted := make(chan struct{}, 1)
	w.tasks.Go(func() {
		if err := WatchMounts(ctx, "/proc/self/mountinfo", mounted); err != nil {
			w.log.Warn("mounts over a watched directory are noticed late", "error", err, "after", w.slowLook)
		}
	})
	w.loop(ctx, mounted)
	w.mu.Lock()
	n := w.inotify
	w.ctx, w.inotify = nil, nil
	w.mu.Unlock()
	var err error
	if n != nil {
		err = n.close()
	}
	w.tasks.Wait()
	return err
}

func (w *Watcher) loop(ctx context.Context, mounted <-chan struct{}) {
	slow := time.Tick(w.slowLook)
	var poll <-chan time.Time // nil: not polling
	for {
		switch why := w.Polling(); {
		case why != "" && poll == nil:
			poll = time.Tick(w.pollInterval)
			w.log.Warn("changes are polled, not reported by the kernel", "every", w.pollInterval, "reason", why)
		case why == "" && poll != nil:
			poll = nil
			w.log.Info("changes are reported by the kernel again")
		}
		select {
		case <-ctx.Done():
			return
		case <-w.kick:
		case <-mounted:
			w.lookAtMounts(ctx)
			rate.Pause(ctx, mountPause)
		case <-slow:
			// A walk does not show what changed and changed back, or what a receiver missed.
			w.look(ctx, nil, true)
		case <-poll:
			// Always with a hint: a socket that is restored after one look and removed before the
			// next looks unchanged, and would never be restored again.
			w.look(ctx, func(r *route) bool { return w.polled[r] != nil }, true)
		}
	}
}

// look starts walks of the selected paths (nil: all), which find what no event reported, such as
// mounts. It also retries to open inotify. With hint, a walk that finds nothing new gives a hint
// too.
func (w *Watcher) look(ctx context.Context, which func(*route) bool, hint bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ctx = ctx
	if w.inotify == nil {
		w.inotify, w.noInotify = w.open() // waits for no file system
		if n := w.inotify; n != nil {
			w.tasks.Go(func() { w.read(n) })
		}
	}
	for r := range w.routes {
		if which == nil || which(r) {
			w.walkSoon(r, hint)
		}
	}
}

func (w *Watcher) read(n notifier) {
	buf := make([]byte, readBuffer)
	reads := rate.Bucket{Burst: readsAtOnce, Interval: readEvery}
	for {
		size, err := n.read(buf)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) { // no cause is known
				w.log.Error("inotify failed; changes are noticed late", "error", err, "after", w.slowLook)
			}
			return
		}
		w.dispatch(buf[:size])
		now := time.Now()
		time.Sleep(reads.Next(now).Sub(now)) // mostly not at all
		reads.Take(now)
	}
}

// dispatch starts walks for events, which are structs inotify_event (inotify(7)).
func (w *Watcher) dispatch(buf []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(buf) >= unix.SizeofInotifyEvent {
		wd, mask := int32(binary.NativeEndian.Uint32(buf)), binary.NativeEndian.Uint32(buf[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buf[12:]))
		end = min(end, len(buf)) // the kernel writes whole events only
		name, _, _ := bytes.Cut(buf[unix.SizeofInotifyEvent:end], []byte{0})
		buf = buf[end:]
		if mask&unix.IN_Q_OVERFLOW != 0 { // events of any path were lost
			for r := range w.routes {
				w.walkSoon(r, true)
			}
			continue
		}
		if mask&unix.IN_IGNORED != 0 {
			w.ignored++
		}
		if at := w.watches[wd]; len(name) > 0 {
			w.changed(mask, at[string(name)])
			w.changed(mask, at[""])
		} else { // about the directory itself: mode, owner, moved, deleted
			for _, routes := range at {
				w.changed(mask, routes)
			}
		}
		if mask&unix.IN_IGNORED != 0 {
			delete(w.watches, wd)
		}
	}
}

func (w *Watcher) changed(mask uint32, routes []*route) {
	for _, r := range routes {
		if mask&unix.IN_CLOSE_WRITE == 0 || r.sub.content {
			w.walkSoon(r, true)
		}
	}
}

// setPolled records why r is polled; nil: it is not. w.mu must be held.
func (w *Watcher) setPolled(r *route, why error) {
	if why == nil {
		delete(w.polled, r)
	} else {
		w.polled[r] = why
	}
	if (len(w.polled) > 0) == (w.reason != "") {
		return
	}
	w.reason = ""
	if why != nil {
		w.reason = why.Error()
	}
	rate.Hint(w.kick)
}
