package fswatch

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

const soon = 2 * time.Second // far below a slow look, far above what an event takes

// quiet is how long a test checks that no hint comes.
const quiet = 50 * time.Millisecond

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(fake.ShortDir(t))
	must(t, err)
	return dir
}

// start runs a watcher until the test ends, and checks that it leaves nothing behind.
func start(t testing.TB, prepare ...func(*Watcher)) *Watcher {
	t.Helper()
	w := New(slog.New(slog.DiscardHandler), worker.NewPool())
	w.slowLook = time.Hour // a test that passes must owe it to an event
	for _, f := range prepare {
		f(w)
	}
	run(t, w)
	return w
}

func run(t testing.TB, w *Watcher) {
	t.Helper()
	goroutines, descriptors := runtime.NumGoroutine(), fake.Descriptors(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	waitUntilRunning(t, w)
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		for range 100 { // other tests' connections may be on their way out
			if runtime.NumGoroutine() <= goroutines && fake.Descriptors(t) <= descriptors {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		t.Errorf("left behind: %d goroutines (were %d), %d descriptors (were %d)",
			runtime.NumGoroutine(), goroutines, fake.Descriptors(t), descriptors)
	})
}

func waitUntilRunning(t testing.TB, w *Watcher) {
	t.Helper()
	within(t, "does not start", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.ctx != nil
	})
}

func expectHint(t testing.TB, s *Subscription, what string) {
	t.Helper()
	select {
	case <-s.Hints():
	case <-time.After(soon):
		t.Fatalf("no hint: %s", what)
	}
}

// subscribe waits for the end of the first walk, and receives its hint.
func subscribe(t testing.TB, f func(...string) *Subscription, paths ...string) *Subscription {
	t.Helper()
	s := f(paths...)
	walked(t, s)
	select {
	case <-s.Hints():
	default:
		t.Fatal("no hint after the first walk")
	}
	return s
}

// walked waits until no path of s is being walked.
func walked(t testing.TB, s *Subscription) {
	t.Helper()
	within(t, "the walk does not end", func() bool {
		s.w.mu.Lock()
		defer s.w.mu.Unlock()
		return !slices.ContainsFunc(s.routes, func(r *route) bool { return r.walking })
	})
}

func within(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(soon); !f(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func expectEmpty(t testing.TB, w *Watcher) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.routes)+len(w.watches)+len(w.polled) != 0 {
		t.Errorf("left over: %d paths, %d watches, %d polled", len(w.routes), len(w.watches), len(w.polled))
	}
}

func expectQuiet(t testing.TB, s *Subscription, what string) {
	t.Helper()
	select {
	case <-s.Hints():
		t.Fatalf("a hint: %s", what)
	case <-time.After(quiet):
	}
}

// calm receives hints until none has come for a while: one change can cause several.
func calm(s *Subscription) {
	for {
		select {
		case <-s.Hints():
		case <-time.After(quiet):
			return
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func listen(t testing.TB, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { l.Close() })
	return l
}

// A look after a mount, which causes no event at the path, finds a socket that has the inode number
// of the removed one, so that only its change time differs.
func TestSocketReplacedByOneWithItsInodeNumber(t *testing.T) {
	path := filepath.Join(tempDir(t), "csi.sock")
	var changes atomic.Int64
	w := start(t, func(w *Watcher) {
		lstat := w.calls.lstat
		w.calls.lstat = func(at string, st *unix.Stat_t) error {
			err := lstat(at, st)
			if at == path {
				st.Ctim = unix.NsecToTimespec(changes.Load())
			}
			return err
		}
	})
	listen(t, path)
	s := subscribe(t, w.Subscribe, path)
	calm(s)
	w.mu.Lock()
	ctx := w.ctx
	w.mu.Unlock()
	w.look(ctx, nil, false)
	walked(t, s)
	expectQuiet(t, s, "nothing has changed")
	changes.Add(1)
	w.look(ctx, nil, false)
	expectHint(t, s, "another socket is in its place")
}

func TestPathItself(t *testing.T) {
	w, dir := start(t), tempDir(t)
	path, other := filepath.Join(dir, "csi.sock"), filepath.Join(dir, "other")
	s := subscribe(t, w.Subscribe, path)
	defer s.Close()
	expectQuiet(t, s, "nothing happened")
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"bound", func() error { listen(t, path); return nil }},
		{"chmod", func() error { return os.Chmod(path, 0o600) }},
		{"renamed away", func() error { return os.Rename(path, other) }},
		{"renamed back", func() error { return os.Rename(other, path) }},
		{"replaced", func() error { listen(t, other); return os.Rename(other, path) }},
		{"removed", func() error { return os.Remove(path) }},
		{"a link", func() error { return os.Symlink("nowhere", path) }},
	} {
		must(t, step.do())
		expectHint(t, s, step.name)
		calm(s)
	}
}

func TestUnrelatedIsQuiet(t *testing.T) {
	w, dir := start(t), tempDir(t)
	path := filepath.Join(dir, "csi.sock")
	must(t, os.WriteFile(path, nil, 0o600))
	s := subscribe(t, w.Subscribe, path)
	defer s.Close()
	must(t, os.WriteFile(filepath.Join(dir, "other"), []byte("x"), 0o600))
	must(t, os.Chmod(filepath.Join(dir, "other"), 0o644))
	must(t, os.Mkdir(filepath.Join(dir, "csi.sock.d"), 0o755))
	must(t, os.Remove(filepath.Join(dir, "other")))
	expectQuiet(t, s, "other names changed")
	must(t, os.WriteFile(path, []byte("content"), 0o600))
	expectQuiet(t, s, "it was only written to")
}

func TestParentsThatDoNotExist(t *testing.T) {
	w, dir := start(t), tempDir(t)
	for i := range 50 { // it is a race: directories are made while watches are placed
		top := filepath.Join(dir, fmt.Sprint("p", i))
		path := filepath.Join(top, "a/b/c/csi.sock")
		s := w.Subscribe(path)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		listen(t, path)
		waitUntilSeen(t, s, path)
		must(t, os.RemoveAll(top))
		waitUntilGone(t, s, path)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		listen(t, path)
		waitUntilSeen(t, s, path)
		s.Close()
	}
	expectEmpty(t, w)
}

// waitUntilSeen looks at each hint, and only then, as a user of hints does.
func waitUntilSeen(t *testing.T, s *Subscription, path string) {
	t.Helper()
	for {
		expectHint(t, s, "waiting for "+path)
		if _, err := os.Lstat(path); err == nil {
			return
		}
	}
}

func waitUntilGone(t *testing.T, s *Subscription, path string) {
	t.Helper()
	for {
		expectHint(t, s, "waiting for the end of "+path)
		if _, err := os.Lstat(path); err != nil {
			return
		}
	}
}

func TestFoldersOnTheWay(t *testing.T) {
	w, dir := start(t), tempDir(t)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "a/b")
	path := filepath.Join(b, "csi.sock")
	must(t, os.MkdirAll(b, 0o755))
	s := subscribe(t, w.Subscribe, path)
	defer s.Close()
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"mode of a parent", func() error { return os.Chmod(b, 0o700) }},
		{"mode of a grandparent", func() error { return os.Chmod(a, 0o700) }},
		{"grandparent renamed away", func() error { return os.Rename(a, a+"2") }},
		{"grandparent made again", func() error { return os.MkdirAll(b, 0o755) }},
		{"file in the new one", func() error { return os.WriteFile(path, nil, 0o600) }},
		{"grandparent swapped", func() error { return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, a+"2", unix.RENAME_EXCHANGE) }},
		{"file in the swapped one", func() error { return os.WriteFile(path, nil, 0o600) }},
	} {
		must(t, step.do())
		expectHint(t, s, step.name)
		calm(s)
	}
	must(t, os.RemoveAll(b))
	waitUntilGone(t, s, path)
	calm(s)
	must(t, os.WriteFile(b, nil, 0o600))
	expectHint(t, s, "parent is a file")
	must(t, os.Remove(b))
	must(t, os.Mkdir(b, 0o755))
	must(t, os.WriteFile(path, nil, 0o600))
	waitUntilSeen(t, s, path)
	calm(s)
	must(t, os.WriteFile(filepath.Join(a+"2", "b", "unrelated"), nil, 0o600))
	expectQuiet(t, s, "the directory that was moved away")
}

func TestSymlinks(t *testing.T) {
	w, dir := start(t), tempDir(t)
	real1, real2, link := filepath.Join(dir, "r1"), filepath.Join(dir, "r2"), filepath.Join(dir, "link")
	must(t, os.MkdirAll(filepath.Join(real1, "x"), 0o755))
	must(t, os.MkdirAll(filepath.Join(real2, "x"), 0o755))
	must(t, os.Symlink("r1", link))
	direct, through := subscribe(t, w.Subscribe, filepath.Join(real1, "x/s")), subscribe(t, w.Subscribe, filepath.Join(link, "x/s"))
	defer direct.Close()
	defer through.Close()

	listen(t, filepath.Join(real1, "x/s"))
	expectHint(t, direct, "made")
	expectHint(t, through, "made behind the link")
	calm(direct)
	calm(through)

	must(t, os.Symlink(real2, link+".new"))
	must(t, os.Rename(link+".new", link))
	expectHint(t, through, "the link leads elsewhere")
	calm(through)
	expectQuiet(t, direct, "the link leads elsewhere")

	listen(t, filepath.Join(real2, "x/s"))
	expectHint(t, through, "made at the new place")
	calm(through)
	must(t, os.Remove(filepath.Join(real1, "x/s")))
	expectHint(t, direct, "removed")
	expectQuiet(t, through, "removed at the old place")

	must(t, os.Remove(link)) // a loop must not hang it
	must(t, os.Symlink("link", link))
	expectHint(t, through, "a loop")
	calm(through)
	must(t, os.Remove(link))
	must(t, os.Symlink("./r2/../r1", link))
	listenAt := filepath.Join(real1, "x/s")
	calm(through)
	listen(t, listenAt)
	expectHint(t, through, "made behind dots")

	// The last name is a link as well, as an endpoint may be.
	leaf := filepath.Join(dir, "leaf")
	must(t, os.Symlink("r2/x/late", leaf))
	late := subscribe(t, w.Subscribe, leaf)
	defer late.Close()
	listen(t, filepath.Join(real2, "x/late"))
	expectHint(t, late, "the target of the last name")
}

// A directory with a bind mount elsewhere is one inode with one watch.
func TestOneFolderTwoNames(t *testing.T) {
	w := New(slog.New(slog.DiscardHandler), worker.NewPool())
	w.slowLook = time.Hour
	n := &fakeNotifier{wds: map[string]int32{}, reads: make(chan []byte), closed: make(chan struct{})}
	n.same = func(string) string { return "one inode" }
	w.open = func() (notifier, error) { return n, nil }
	run(t, w)
	dir := tempDir(t)
	must(t, os.Mkdir(filepath.Join(dir, "a"), 0o755))
	must(t, os.Mkdir(filepath.Join(dir, "b"), 0o755))
	a, b := subscribe(t, w.Subscribe, filepath.Join(dir, "a/s")), subscribe(t, w.Subscribe, filepath.Join(dir, "b/s"))
	n.event(1, unix.IN_CREATE, "s")
	expectHint(t, a, "by the first name")
	expectHint(t, b, "by the second name")
	a.Close()
	n.event(1, unix.IN_CREATE, "s")
	expectHint(t, b, "still watched")
	expectQuiet(t, a, "closed")
	b.Close()
}

func TestDir(t *testing.T) {
	w, dir := start(t), tempDir(t)
	conf := filepath.Join(dir, "csi-registrar/conf.d")
	s, plain := subscribe(t, w.SubscribeDir, conf), subscribe(t, w.Subscribe, conf)
	defer s.Close()
	defer plain.Close()
	file := filepath.Join(conf, "10-nfs.toml")
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"directories made", func() error { return os.MkdirAll(conf, 0o755) }},
		{"file made", func() error { return os.WriteFile(file, []byte("x"), 0o600) }},
		{"written in place", func() error { return os.WriteFile(file, []byte("y"), 0o600) }},
		{"chmod", func() error { return os.Chmod(file, 0o644) }},
		{"renamed over", func() error {
			must(t, os.WriteFile(filepath.Join(dir, "new"), nil, 0o600))
			return os.Rename(filepath.Join(dir, "new"), file)
		}},
		{"removed", func() error { return os.Remove(file) }},
		{"directory removed", func() error { return os.Remove(conf) }},
		{"directory and file made", func() error {
			must(t, os.Mkdir(conf, 0o755))
			return os.WriteFile(file, nil, 0o600)
		}},
		{"file in the new directory", func() error { return os.WriteFile(file+"2", nil, 0o600) }},
	} {
		calm(plain)
		must(t, step.do())
		expectHint(t, s, step.name)
		calm(s)
		if strings.HasPrefix(step.name, "file") || step.name == "chmod" {
			expectQuiet(t, plain, "an entry, to one who asked for the directory alone")
		}
	}
}

// A file that is written in place, also through a symbolic link.
func TestFileContent(t *testing.T) {
	w, dir := start(t), tempDir(t)
	directory, elsewhere := filepath.Join(dir, "csi-registrar"), filepath.Join(dir, "elsewhere")
	file, link := filepath.Join(directory, "config.toml"), filepath.Join(dir, "link")
	must(t, os.Symlink("elsewhere/target", link))
	s, linked, plain := subscribe(t, w.SubscribeDir, file), subscribe(t, w.SubscribeDir, link), subscribe(t, w.Subscribe, file, link)
	defer s.Close()
	defer linked.Close()
	defer plain.Close()
	for range 2 {
		must(t, os.Mkdir(directory, 0o755))
		must(t, os.Mkdir(elsewhere, 0o755))
		for range 2 {
			must(t, os.WriteFile(file, []byte("x"), 0o600))
			must(t, os.WriteFile(link, []byte("x"), 0o600))
			expectHint(t, s, "written")
			expectHint(t, linked, "written where the link leads")
			calm(s)
			calm(linked)
		}
		must(t, os.WriteFile(filepath.Join(directory, "other"), nil, 0o600))
		must(t, os.WriteFile(filepath.Join(elsewhere, "other"), nil, 0o600))
		expectQuiet(t, s, "another file")
		expectQuiet(t, linked, "another file")
		must(t, os.RemoveAll(directory))
		must(t, os.RemoveAll(elsewhere))
		calm(s)
		calm(linked)
	}
}

func TestAThousandRouted(t *testing.T) {
	w, dir := start(t), tempDir(t)
	const n = 1000
	subs := make([]*Subscription, n)
	before := heap()
	for i := range subs {
		subs[i] = subscribe(t, w.Subscribe, filepath.Join(dir, fmt.Sprintf("d%d-reg.sock", i)))
	}
	t.Logf("%d bytes a subscription", (heap()-before)/n)
	all := subscribe(t, w.SubscribeDir, dir)
	w.mu.Lock()
	if len(w.watches) > strings.Count(dir, "/")+1 {
		t.Errorf("%d watches for one directory", len(w.watches))
	}
	w.mu.Unlock()
	for _, i := range []int{0, 417, 999} {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("d%d-reg.sock", i)), nil, 0o600))
		expectHint(t, subs[i], "its own")
		expectHint(t, all, "the directory")
		time.Sleep(quiet)
		for j, s := range subs {
			if len(s.hints) > 0 && i != j {
				t.Fatalf("%d was hinted because of %d", j, i)
			}
		}
		calm(subs[i])
		calm(all)
	}
	// A change on the way concerns all of them.
	must(t, os.Rename(dir, dir+"2"))
	must(t, os.Rename(dir+"2", dir))
	late := time.After(time.Minute) // a thousand walks, perhaps on a busy machine
	for _, s := range subs {
		select {
		case <-s.Hints():
		case <-late:
			t.Fatal("no hint: the directory was renamed")
		}
	}
	for _, s := range subs {
		s.Close()
	}
	all.Close()
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestLatency(t *testing.T) {
	w, dir := start(t), tempDir(t)
	path := filepath.Join(dir, "not/yet/csi.sock")
	var worst, sum time.Duration
	const n = 20
	for range n {
		s := subscribe(t, w.Subscribe, path) // the walks of each are limited
		begun := time.Now()
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, nil, 0o600))
		waitUntilSeen(t, s, path)
		d := time.Since(begun)
		worst, sum = max(worst, d), sum+d
		must(t, os.RemoveAll(filepath.Join(dir, "not")))
		waitUntilGone(t, s, path)
		s.Close()
	}
	t.Logf("mean %v, worst %v", sum/n, worst)
	if sum/n > walkEvery/2 { // so that it cannot be the limit of walks
		t.Errorf("slow: mean %v", sum/n)
	}
}

// A change before Run is not missed: a hint comes once the watches are in place.
func TestSubscribedBeforeRun(t *testing.T) {
	dir := tempDir(t)
	var s *Subscription
	start(t, func(w *Watcher) { s = w.Subscribe(filepath.Join(dir, "f")) })
	expectHint(t, s, "it runs now")
	must(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o600))
	expectHint(t, s, "made")
	s.Close()
	s.Close()
}

func TestHintByTheHolder(t *testing.T) {
	w := start(t)
	s := subscribe(t, w.Subscribe, "/nowhere/at/all")
	s.Hint()
	s.Hint()
	expectHint(t, s, "my own")
	expectQuiet(t, s, "two are one")
	s.Close()
}

func TestClosingRaces(t *testing.T) {
	w, dir := start(t, func(w *Watcher) { w.slowLook = time.Millisecond }), tempDir(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			path := filepath.Join(dir, fmt.Sprint(i%2), "x/s")
			for ctx.Err() == nil {
				s, d := w.Subscribe(path, dir), w.SubscribeDir(filepath.Dir(path))
				os.MkdirAll(filepath.Dir(path), 0o755)
				os.WriteFile(path, nil, 0o600)
				os.RemoveAll(filepath.Join(dir, fmt.Sprint(i%2)))
				w.Polling()
				s.Close()
				d.Close()
			}
		})
	}
	wg.Wait()
	expectEmpty(t, w)
}

// The slow look gives a hint to everybody, for changes that inotify did not report or a receiver
// missed.
func TestSlowLook(t *testing.T) {
	dir := tempDir(t)
	w := start(t, func(w *Watcher) {
		w.slowLook = 20 * time.Millisecond
		w.open = func() (notifier, error) { return deaf(), nil }
	})
	a, d := subscribe(t, w.Subscribe, filepath.Join(dir, "a")), subscribe(t, w.SubscribeDir, dir)
	for range 3 {
		expectHint(t, a, "a look")
		expectHint(t, d, "a look")
	}
	if w.Polling() != "" {
		t.Errorf("degraded: %s", w.Polling())
	}
	a.Close()
	d.Close()
}

// A recreated directory may have the same inode number.
func TestSlowLookAtAnotherFolder(t *testing.T) {
	n := deaf()
	w := start(t, func(w *Watcher) {
		w.slowLook = 20 * time.Millisecond
		w.open = func() (notifier, error) { return n, nil }
	})
	dir := tempDir(t)
	s := subscribe(t, w.Subscribe, filepath.Join(dir, "s"))
	n.mu.Lock()
	delete(n.wds, dir)
	n.next++
	n.mu.Unlock()
	for deadline := time.Now().Add(soon); ; time.Sleep(time.Millisecond) {
		n.mu.Lock()
		_, again := n.wds[dir]
		n.mu.Unlock()
		if again {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the directory is not watched again")
		}
	}
	s.Close()
}

// The hint comes after the walk, so that its receiver sees at least what the walk saw, including
// files that were created before their directory was watched.
func TestHintComesLast(t *testing.T) {
	var made atomic.Pointer[Subscription] // somebody else's mount may cause a look at any time
	n := deaf()
	dir := tempDir(t)
	top := filepath.Join(dir, "a")
	var early atomic.Bool
	n.added = func(directory string) {
		if strings.HasPrefix(directory, top) {
			if s := made.Load(); s != nil && len(s.hints) > 0 {
				early.Store(true)
			}
			// Nobody gets its event.
			must(t, os.WriteFile(filepath.Join(directory, "s"), nil, 0o600))
		}
	}
	w := start(t, func(w *Watcher) { w.open = func() (notifier, error) { return n, nil } })
	s := subscribe(t, w.Subscribe, filepath.Join(top, "s"))
	made.Store(s)
	defer s.Close()
	must(t, os.Mkdir(top, 0o755))
	n.mu.Lock()
	wd := n.wds[dir]
	n.mu.Unlock()
	n.event(wd, unix.IN_CREATE, "a")
	waitUntilSeen(t, s, filepath.Join(top, "s"))
	if early.Load() {
		t.Error("hinted before all was seen")
	}
}

func TestOverflow(t *testing.T) {
	n := deaf()
	w := start(t, func(w *Watcher) { w.open = func() (notifier, error) { return n, nil } })
	dir := tempDir(t)
	a, b := subscribe(t, w.Subscribe, filepath.Join(dir, "a")), subscribe(t, w.SubscribeDir, filepath.Join(dir, "b"))
	n.event(-1, unix.IN_Q_OVERFLOW, "")
	expectHint(t, a, "overflow")
	expectHint(t, b, "overflow")
	a.Close()
	b.Close()
}

func TestDegraded(t *testing.T) {
	for _, c := range []struct {
		name   string
		open   error // of the instance
		add    error // of each watch
		naming string
	}{
		{"no instance", unix.EMFILE, nil, "fs.inotify.max_user_instances"},
		{"no watches", nil, unix.ENOSPC, "fs.inotify.max_user_watches"},
		{"not readable", nil, unix.EACCES, "permission"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var (
				mu      sync.Mutex
				limited = true
				logged  fake.Buffer
			)
			is := func(err error) error {
				mu.Lock()
				defer mu.Unlock()
				if limited {
					return err
				}
				return nil
			}
			w := New(slog.New(slog.NewTextHandler(&logged, nil)), worker.NewPool())
			w.slowLook, w.pollInterval = time.Hour, 20*time.Millisecond
			w.open = func() (notifier, error) {
				if err := is(c.open); err != nil {
					return nil, fmt.Errorf("cannot open inotify: %w", err)
				}
				n, err := openInotify()
				return &limitedNotifier{notifier: n, limit: func() error { return is(c.add) }}, err
			}
			dir := tempDir(t)
			path := filepath.Join(dir, "x/s")
			run(t, w)
			s, d := subscribe(t, w.Subscribe, path), subscribe(t, w.SubscribeDir, dir)
			if got := w.Polling(); !strings.Contains(got, c.naming) {
				t.Fatalf("degraded %q does not name %s", got, c.naming)
			}
			must(t, os.Mkdir(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, nil, 0o600))
			waitUntilSeen(t, s, path)
			for range 3 { // without end: nothing changes any more
				expectHint(t, s, "each look: it may have changed and changed back")
				expectHint(t, d, "each look")
			}

			mu.Lock()
			limited = false
			mu.Unlock()
			for deadline := time.Now().Add(soon); w.Polling() != ""; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("still degraded: %s", w.Polling())
				}
			}
			calm(s)
			calm(d)
			must(t, os.Remove(path))
			expectHint(t, s, "told by the kernel again")
			expectQuiet(t, d, "no look once a second any more")
			s.Close()
			d.Close()
			within(t, "the end is not logged", func() bool { return strings.Count(logged.String(), "\n") >= 2 })
			if got := strings.Count(logged.String(), "\n"); got != 2 {
				t.Errorf("%d log lines, want one for the begin and one for the end:\n%s", got, logged.String())
			}
		})
	}
}

type limitedNotifier struct {
	notifier
	limit func() error
}

func (l *limitedNotifier) add(directory string, mask uint32) (int32, error) {
	if err := l.limit(); err != nil {
		return -1, err
	}
	return l.notifier.add(directory, mask)
}

// fakeNotifier reports only what a test puts in.
type fakeNotifier struct {
	mu     sync.Mutex
	wds    map[string]int32
	next   int32
	added  func(directory string) // called before a watch is in place
	same   func(string) string    // one inode for several names
	reads  chan []byte
	closed chan struct{}
}

func deaf() *fakeNotifier {
	return &fakeNotifier{wds: map[string]int32{}, reads: make(chan []byte), closed: make(chan struct{}), same: func(s string) string { return s }}
}

func (n *fakeNotifier) add(directory string, _ uint32) (int32, error) {
	if _, err := os.Lstat(directory); err != nil {
		return -1, unix.ENOENT
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	inode := n.same(directory)
	if n.wds[inode] == 0 {
		if n.added != nil {
			n.added(directory)
		}
		n.next++
		n.wds[inode] = n.next
	}
	return n.wds[inode], nil
}

func (n *fakeNotifier) remove(int32) {}

func (n *fakeNotifier) read(buf []byte) (int, error) {
	select {
	case b := <-n.reads:
		return copy(buf, b), nil
	case <-n.closed:
		return 0, os.ErrClosed
	}
}

func (n *fakeNotifier) close() error { close(n.closed); return nil }

func (n *fakeNotifier) event(wd int32, mask uint32, name string) {
	b := make([]byte, unix.SizeofInotifyEvent+16)
	copy(b[unix.SizeofInotifyEvent:], name)
	for i := range 4 {
		b[i], b[4+i] = byte(uint32(wd)>>(8*i)), byte(mask>>(8*i)) // test machines are little-endian
	}
	b[12] = 16
	n.reads <- b
}
