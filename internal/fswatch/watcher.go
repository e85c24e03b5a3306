// Package fswatch tells that "something changed there": hints from inotify about paths
// that need not exist yet, and a slow look again as the safety net. A hint carries no
// news; who gets one looks for himself.
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
)

// Options are the watcher's intervals; the zero value is good.
type Options struct {
	SlowLook  time.Duration // how often to look without any event; default 5 minutes
	BlindLook time.Duration // how often to look where inotify cannot; default 1 second
}

// mountPause is how long to rest between two looks because of mounts. Starting pods makes
// dozens of mounts at once.
const mountPause = 100 * time.Millisecond

// Watcher watches the folders on the way to many paths with one inotify instance, one
// watch for each folder, and one timer. An event wakes only the subscriptions that
// follow the name it is about.
type Watcher struct {
	log  *slog.Logger
	o    Options
	open func() (notifier, error)
	kick chan struct{} // capacity one: there is a blind folder to look at sooner

	// Without the lock, so that who asks never waits for a file system that hangs.
	degraded atomic.Pointer[string]

	mu        sync.Mutex // held for looks at the file system, never while somebody waits
	started   bool
	running   bool
	subs      map[*Subscription]struct{}
	folders   map[string]*folder
	byWD      map[int32][]*folder // more than one: a folder with several names (bind mounts)
	blind     map[*folder]error   // folders that exist but cannot be watched
	inotify   notifier
	noInotify error // why inotify is nil
	gen       uint64
	marked    []*Subscription
	readers   sync.WaitGroup
}

// New returns a watcher that watches once it runs.
func New(log *slog.Logger, o Options) *Watcher {
	o.SlowLook = cmp.Or(o.SlowLook, 5*time.Minute)
	o.BlindLook = cmp.Or(o.BlindLook, time.Second)
	return &Watcher{
		log:     log,
		o:       o,
		open:    openInotify,
		kick:    make(chan struct{}, 1),
		subs:    make(map[*Subscription]struct{}),
		folders: make(map[string]*folder),
		byWD:    make(map[int32][]*folder),
		blind:   make(map[*folder]error),
	}
}

// Degraded tells why changes are looked for once a second (Options.BlindLook) instead of
// being told by the kernel, and what would mend it; empty while all is well.
func (w *Watcher) Degraded() string {
	if why := w.degraded.Load(); why != nil {
		return *why
	}
	return ""
}

// Run watches until ctx is done, and returns when everything is released. It fails only
// if it ran before: what cannot be watched is looked at instead.
func (w *Watcher) Run(ctx context.Context) error {
	if err := w.claim(); err != nil {
		return err
	}
	m, err := openMounts() // before anything is looked at, to miss nothing
	if err != nil {
		w.warnMounts(err)
		m = &mounts{} // its hints never come
	}
	var wg sync.WaitGroup
	if m.file != nil {
		wg.Go(func() {
			if err := m.run(ctx); err != nil {
				w.warnMounts(err)
			}
		})
	}
	w.start()
	w.loop(ctx, m.hints)
	err = errors.Join(w.stop(), m.close())
	wg.Wait()
	w.readers.Wait()
	return err
}

func (w *Watcher) warnMounts(err error) {
	w.log.Warn("mounts over a watched folder are noticed late", "error", err, "after", w.o.SlowLook)
}

func (w *Watcher) loop(ctx context.Context, mounted <-chan struct{}) {
	var (
		last    = time.Now() // the last look at everything
		because time.Time    // the last of these because of a mount
		pending bool         // a mount was seen since
		timer   = time.NewTimer(w.o.SlowLook)
	)
	defer timer.Stop()
	for {
		wait := w.o.SlowLook - time.Since(last)
		if w.hasBlind() {
			wait = min(wait, w.o.BlindLook)
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
		if pending || time.Since(last) >= w.o.SlowLook {
			slow := time.Since(last) >= w.o.SlowLook
			w.lookAtAll(slow)
			now := time.Now()
			if pending {
				because, pending = now, false
			}
			if slow {
				last = now
			}
		} else {
			w.lookAtBlind()
		}
	}
}

func (w *Watcher) claim() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.started {
		return errors.New("cannot watch: the watcher ran already")
	}
	w.started = true
	return nil
}

func (w *Watcher) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = true
	w.openInotify()
	w.begin()
	for s := range w.subs {
		w.mark(s)
	}
	w.settle()
}

func (w *Watcher) stop() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = false
	if w.inotify == nil {
		return nil
	}
	err := w.inotify.close()
	w.inotify = nil
	if err != nil {
		return fmt.Errorf("cannot close inotify: %w", err)
	}
	return nil
}

func (w *Watcher) openInotify() {
	w.inotify, w.noInotify = w.open()
	if n := w.inotify; n != nil {
		w.readers.Go(func() { w.read(n) })
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
// known to cause; then the next look opens another one.
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
	clear(w.byWD)
	w.begin()
	for _, f := range w.folders {
		f.wd = -1
		w.watch(f)
	}
	w.settle()
}

func (w *Watcher) dispatch(n notifier, buf []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inotify != n {
		return
	}
	w.begin()
	for e := range events(buf) {
		if e.mask&unix.IN_Q_OVERFLOW != 0 { // events were lost: anybody's
			for s := range w.subs {
				w.mark(s)
			}
			continue
		}
		for _, f := range w.byWD[e.wd] {
			switch {
			case len(e.name) == 0: // the folder itself: mode, owner, moved, gone
				w.markFolder(f)
			default:
				if entry := f.entries[string(e.name)]; entry != nil {
					w.mark(entry.subs...)
				}
				w.mark(f.subs...)
			}
		}
		if e.mask&unix.IN_IGNORED != 0 { // the kernel removed the watch
			for _, f := range w.byWD[e.wd] {
				f.wd = -1
			}
			delete(w.byWD, e.wd)
		}
	}
	w.settle()
}

// lookAtAll finds what no event told: mounts, and whatever else the kernel keeps silent
// about. The slow look hints everybody: what changed and changed back, or what somebody
// missed for whatever reason, does not show here.
func (w *Watcher) lookAtAll(slow bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inotify == nil {
		w.openInotify()
	}
	w.begin()
	for _, f := range w.folders {
		w.lookInto(f)
	}
	if slow {
		for s := range w.subs {
			w.mark(s)
		}
	}
	w.settle()
}

// lookAtBlind looks where inotify cannot, and tries again to have it. Everybody there is
// hinted: a socket that is restored after one look and removed before the next looks as if
// nothing had happened, and would never be restored again.
func (w *Watcher) lookAtBlind() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inotify == nil {
		w.openInotify()
	}
	w.begin()
	for f := range w.blind {
		w.lookInto(f)
		w.mark(f.subs...)
		for _, e := range f.entries {
			w.mark(e.subs...)
		}
	}
	w.settle()
}

func (w *Watcher) lookInto(f *folder) {
	w.watch(f)
	for _, e := range f.entries {
		w.observe(e)
	}
	if len(f.subs) > 0 {
		if _, mtime := look(f.path); mtime != f.mtime {
			f.mtime = mtime
			w.mark(f.subs...)
		}
	}
}

func (w *Watcher) hasBlind() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.blind) > 0
}

// tellDegraded logs when looking takes the place of being told, and when that is over.
func (w *Watcher) tellDegraded() {
	was := w.degraded.Load() != nil
	switch {
	case len(w.blind) == 0 && was:
		w.degraded.Store(nil)
		w.log.Info("changes are told by the kernel again")
	case len(w.blind) > 0 && !was:
		var why string
		for f, err := range w.blind {
			why = whyBlind(f.path, err)
			break
		}
		w.degraded.Store(&why)
		w.log.Warn("changes are looked for, not told by the kernel", "every", w.o.BlindLook, "reason", why)
		select {
		case w.kick <- struct{}{}:
		default:
		}
	}
}
