// Package fswatch gives hints that something changed at a path, which need not exist yet: from
// inotify, and from a slow look as the safety net. A hint has no payload; the receiver re-reads
// the state.
//
// A file system that hangs under one path costs the others nothing: each path is walked in a
// goroutine of its own, by the worker package, and no system call that may wait for a file
// system is made under the Watcher's lock.
package fswatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/worker"
)

// Options are the Watcher's intervals, and where it runs what may hang; the zero value is good.
type Options struct {
	SlowLook     time.Duration // how often to look without any event; default 5 minutes
	PollInterval time.Duration // how often to look where inotify cannot watch; default 1 second
	Pool         *worker.Pool  // default: one of its own
}

// mountPause is the least time between two looks because of mounts: starting pods makes dozens
// of mounts at once.
const mountPause = 100 * time.Millisecond

// Watcher watches the directories on the way to many paths with one inotify instance, one watch
// for each directory, and one timer. An event wakes only those whose path has the name.
type Watcher struct {
	log    *slog.Logger
	o      Options
	open   func() (notifier, error) // tests replace it, and calls
	calls  calls
	kick   chan struct{}          // capacity one: what is polled has changed
	reason atomic.Pointer[string] // of polling; nil: none

	mu        sync.Mutex      // guards memory only; nobody waits long for it
	ctx       context.Context // of Run, for the walks; nil: it does not run
	started   bool
	routes    map[*route]struct{}
	polled    map[*route]error // those with a directory that cannot be watched
	watches   map[int32]watch
	inotify   notifier
	noInotify error  // why inotify is nil
	ignored   uint64 // how many watches the kernel has removed
	tasks     sync.WaitGroup
}

// New returns a Watcher that watches once it runs.
func New(log *slog.Logger, o Options) *Watcher {
	o.SlowLook = cmp.Or(o.SlowLook, 5*time.Minute)
	o.PollInterval = cmp.Or(o.PollInterval, time.Second)
	if o.Pool == nil {
		o.Pool = worker.NewPool()
	}
	return &Watcher{
		log:     log,
		o:       o,
		open:    openInotify,
		calls:   calls{lstat: unix.Lstat, readlink: os.Readlink},
		kick:    make(chan struct{}, 1),
		routes:  make(map[*route]struct{}),
		polled:  make(map[*route]error),
		watches: make(map[int32]watch),
	}
}

// Polling returns why changes are polled (Options.PollInterval) instead of being reported by the
// kernel, and what would fix it; empty while all is well.
func (w *Watcher) Polling() string {
	if why := w.reason.Load(); why != nil {
		return *why
	}
	return ""
}

// Run watches until ctx is done, and returns when everything is released but walks that hang.
// It fails only if it ran before: what cannot be watched is polled instead.
func (w *Watcher) Run(ctx context.Context) error {
	m, err := openMounts() // before anything is looked at, to miss nothing
	if err != nil {
		w.warnMounts(err)
		m = &mounts{} // its hints never come
	}
	if err := w.start(ctx); err != nil {
		return errors.Join(err, m.close())
	}
	if m.file != nil {
		w.tasks.Go(func() {
			if err := m.run(ctx); err != nil {
				w.warnMounts(err)
			}
		})
	}
	w.loop(ctx, m.hints)
	err = errors.Join(w.stop(), m.close())
	w.tasks.Wait()
	return err
}

func (w *Watcher) warnMounts(err error) {
	w.log.Warn("mounts over a watched directory are noticed late", "error", err, "after", w.o.SlowLook)
}

func (w *Watcher) loop(ctx context.Context, mounted <-chan struct{}) {
	var (
		last    = time.Now() // the last slow look
		because time.Time    // the last look because of a mount
		pending bool         // a mount was seen since
		polling bool         // as it was logged
		timer   = time.NewTimer(w.o.SlowLook)
	)
	defer timer.Stop()
	for {
		wait := w.o.SlowLook - time.Since(last)
		why := w.Polling()
		if why != "" {
			wait = min(wait, w.o.PollInterval)
		}
		if polling != (why != "") {
			if polling = why != ""; polling {
				w.log.Warn("changes are polled, not reported by the kernel", "every", w.o.PollInterval, "reason", why)
			} else {
				w.log.Info("changes are reported by the kernel again")
			}
		}
		if pending {
			wait = min(wait, mountPause-time.Since(because))
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case <-w.kick:
			continue
		case <-mounted:
			pending = true
			continue
		case <-timer.C:
		}
		switch now := time.Now(); {
		case now.Sub(last) >= w.o.SlowLook:
			// What changed and changed back, or what somebody missed, a walk does not show.
			w.lookAtAll(true)
			last = now
		case pending:
			w.lookAtAll(false)
			because, pending = now, false
		default:
			w.lookAtPolled()
		}
	}
}

func (w *Watcher) start(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.started {
		return errors.New("cannot watch: the watcher ran already")
	}
	w.started, w.ctx = true, ctx
	w.openInotify()
	for r := range w.routes {
		w.walkSoon(r, true)
	}
	return nil
}

func (w *Watcher) stop() error {
	w.mu.Lock()
	n := w.inotify
	w.ctx, w.inotify = nil, nil
	w.mu.Unlock()
	if n == nil {
		return nil
	}
	if err := n.close(); err != nil {
		return fmt.Errorf("cannot close inotify: %w", err)
	}
	return nil
}

// openInotify makes an instance if there is none; that waits for no file system.
func (w *Watcher) openInotify() {
	if w.inotify != nil {
		return
	}
	w.inotify, w.noInotify = w.open()
	if n := w.inotify; n != nil {
		w.tasks.Go(func() { w.read(n) })
	}
}

func (w *Watcher) read(n notifier) {
	buf := make([]byte, 8<<10) // an event takes 16 bytes and its name
	for {
		size, err := n.read(buf)
		if err != nil {
			w.lost(n, err)
			return
		}
		w.dispatch(n, buf[:size])
	}
}

// lost handles the end of an inotify instance: our own stop, or an error that nothing is
// known to cause. Then all is polled, and the next poll opens another one.
func (w *Watcher) lost(n notifier, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inotify != n {
		return
	}
	if closeErr := n.close(); closeErr != nil && !errors.Is(closeErr, os.ErrClosed) {
		err = errors.Join(err, closeErr)
	}
	w.inotify, w.noInotify = nil, err
	clear(w.watches)
	for r := range w.routes {
		r.steps = nil
		w.walkSoon(r, true)
	}
}

func (w *Watcher) dispatch(n notifier, buf []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inotify != n {
		return
	}
	for e := range events(buf) {
		if e.mask&unix.IN_Q_OVERFLOW != 0 { // events were lost: anybody's
			for r := range w.routes {
				w.walkSoon(r, true)
			}
			continue
		}
		if e.mask&unix.IN_IGNORED != 0 {
			w.ignored++
		}
		watch := w.watches[e.wd]
		if watch == nil {
			continue
		}
		for r := range watch.concerns(e) {
			w.walkSoon(r, true)
		}
		if e.mask&unix.IN_IGNORED != 0 {
			delete(w.watches, e.wd)
		}
	}
}

// lookAtAll finds what no event reported: mounts, and whatever else the kernel keeps silent
// about. With hint also those are hinted whose walk finds nothing new.
func (w *Watcher) lookAtAll(hint bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.openInotify()
	for r := range w.routes {
		w.walkSoon(r, hint)
	}
}

// lookAtPolled looks where inotify cannot, and tries again to watch it. Everybody there is
// hinted: a socket that is restored after one look and removed before the next looks as if
// nothing had happened, and would never be restored again.
func (w *Watcher) lookAtPolled() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.openInotify()
	for r := range w.polled {
		w.walkSoon(r, true)
	}
}

// setPolled notes why r is polled; nil: it is not.
func (w *Watcher) setPolled(r *route, why error) {
	if why == nil {
		delete(w.polled, r)
	} else {
		w.polled[r] = why
	}
	if (len(w.polled) > 0) == (w.reason.Load() != nil) {
		return
	}
	w.reason.Store(nil)
	if why != nil {
		text := why.Error()
		w.reason.Store(&text)
	}
	select {
	case w.kick <- struct{}{}:
	default:
	}
}
