package fswatch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// hangingCalls makes the system calls about a directory hang while it is locked.
type hangingCalls struct {
	sync.RWMutex
	dir string
}

func (h *hangingCalls) install(w *Watcher) {
	old := w.calls
	w.calls.lstat = func(path string, st *unix.Stat_t) error {
		h.wait(path)
		return old.lstat(path, st)
	}
	w.open = func() (notifier, error) {
		n, err := openInotify()
		return &hangingNotifier{notifier: n, h: h}, err
	}
}

func (h *hangingCalls) wait(path string) {
	if strings.HasPrefix(path, h.dir) {
		h.RLock()
		defer h.RUnlock()
	}
}

type hangingNotifier struct {
	notifier
	h *hangingCalls
}

func (n *hangingNotifier) add(dir string, mask uint32) (int32, error) {
	n.h.wait(dir)
	return n.notifier.add(dir, mask)
}

// hangTest has 20 subscriptions, of which one is below dir/hang.
func hangTest(t *testing.T, w *Watcher, pool *worker.Pool, dir string, hang, resume func()) {
	one := filepath.Join(dir, "hang/x/csi.sock")
	others := make([]*Subscription, 19)
	path := func(i int) string { return filepath.Join(dir, fmt.Sprint("d", i), "csi.sock") }
	othersAreHinted := func(when string) {
		t.Helper()
		var took []time.Duration
		for i, s := range others {
			must(t, os.WriteFile(path(i), nil, 0o600))
			begun := time.Now()
			expectHint(t, s, when)
			took = append(took, time.Since(begun))
			must(t, os.Remove(path(i)))
			walked(t, s)
			calmNow(s)
		}
		slices.Sort(took)
		if median := took[len(took)/2]; median > walkLimit/2 { // one may be late on a busy machine
			t.Errorf("%s: hints after %v", when, median)
		}
	}
	abandoned := func() bool { return len(pool.Stuck()) == 1 }

	hang()
	s := w.Subscribe(one, filepath.Join(dir, "d0/endpoint.sock"))
	for i := range others {
		must(t, os.Mkdir(filepath.Dir(path(i)), 0o755))
		others[i] = subscribe(t, w.Subscribe, path(i))
	}
	othersAreHinted("one hangs at Subscribe")
	hangs := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.ContainsFunc(s.routes, func(r *route) bool { return r.hanging })
	}
	for known := false; !known; known = hangs() { // one hint for each path, or one for both
		expectHint(t, s, "a walk has ended, or was abandoned")
	}
	within(t, "the walk is not abandoned", abandoned)
	walked(t, s)
	must(t, os.WriteFile(filepath.Join(dir, "d0/endpoint.sock"), nil, 0o600))
	expectHint(t, s, "its other path, on a file system that answers")
	othersAreHinted("one was abandoned")
	lookAtAll(w)
	othersAreHinted("after a look at everything")
	calm(s)
	resume()
	expectHint(t, s, "its file system answers again")
	within(t, "the walk is still shown", func() bool { return len(pool.Stuck()) == 0 })
	walked(t, s)
	calmNow(s)

	must(t, os.MkdirAll(filepath.Dir(one), 0o755))
	waitUntilSeen(t, s, filepath.Dir(one))
	walked(t, s)
	calmNow(s)
	hang()
	lookAtAll(w)
	othersAreHinted("one hangs at run time")
	within(t, "the walk is not abandoned", abandoned)
	late := w.Subscribe(one)
	walked(t, late)
	expectHint(t, late, "the walk was abandoned before")
	late.Close() // does not wait either
	walked(t, s)
	calmNow(s)
	resume()
	expectHint(t, s, "its file system answers again")
	walked(t, s)
	calmNow(s)
	must(t, os.WriteFile(one, nil, 0o600))
	expectHint(t, s, "an event there")
	walked(t, s)

	hang()
	lookAtAll(w)
	begun := time.Now()
	s.Close()
	for _, o := range others {
		o.Close()
	}
	if d := time.Since(begun); d > 500*time.Millisecond {
		t.Errorf("Close took %v", d)
	}
}

func lookAtAll(w *Watcher) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for r := range w.routes {
		w.walkSoon(r, true)
	}
}

func calmNow(s *Subscription) {
	select {
	case <-s.Hints():
	default:
	}
}

// runHanging runs a Watcher whose end must not wait for what hangs.
func runHanging(t *testing.T, w *Watcher, body, resume func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	waitUntilRunning(t, w)
	body()
	begun := time.Now()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if d := time.Since(begun); d > 500*time.Millisecond {
		t.Errorf("Run took %v to end", d)
	}
	resume()
	within(t, "a walk does not come back", func() bool { return len(w.pool.Stuck()) == 0 })
	expectEmpty(t, w)
}

func TestAPathThatHangsCostsTheOthersNothing(t *testing.T) {
	dir := tempDir(t)
	h := &hangingCalls{dir: filepath.Join(dir, "hang")}
	pool := worker.NewPool()
	w := New(slog.New(slog.DiscardHandler), pool)
	w.slowLook = time.Hour
	h.install(w)
	must(t, os.Mkdir(h.dir, 0o755))
	runHanging(t, w, func() { hangTest(t, w, pool, dir, h.Lock, h.Unlock) }, h.Unlock)
}

func TestARealFileSystemThatHangsCostsTheOthersNothing(t *testing.T) {
	dir := tempDir(t)
	at := filepath.Join(dir, "hang")
	must(t, os.Mkdir(at, 0o755))
	h, err := fake.MountHangFS(at)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
		if os.Getenv("CI") == "true" {
			t.Fatal("a file system that hangs cannot be had here, and under CI it must: ", err)
		}
		t.Skip("a file system that hangs needs root and FUSE: ", err)
	}
	must(t, err)
	defer func() { must(t, h.Close()) }()
	pool := worker.NewPool()
	w := New(slog.New(slog.DiscardHandler), pool)
	w.slowLook = time.Hour
	resume := func() { must(t, h.Resume()) }
	runHanging(t, w, func() { hangTest(t, w, pool, dir, func() { must(t, h.Hang()) }, resume) }, resume)
}
