package systemd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// runStore returns a running Store, and a function that ends it when everything is confirmed and
// returns the error of Run.
func runStore(t *testing.T, n *Notifier, o StoreOptions) (s *Store, flush func() error) {
	t.Helper()
	o.Log = slog.New(slog.DiscardHandler)
	s = NewStore(n, o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	flushed := false
	flush = func() error {
		flushed = true
		cancel()
		return <-done
	}
	t.Cleanup(func() {
		cancel()
		if !flushed {
			<-done
		}
	})
	return s, flush
}

func keep(t *testing.T, s *Store, names ...string) {
	t.Helper()
	for _, name := range names {
		dir := fake.ShortDir(t)
		if err := s.Keep(t.Context(), name, listen(t, filepath.Join(dir, name))); err != nil {
			t.Fatal(err)
		}
	}
}

func wantStored(t *testing.T, m *fake.Manager, want ...string) {
	t.Helper()
	if got := m.Stored(); !slices.Equal(got, want) {
		t.Errorf("stored %q, want %q", got, want)
	}
}

func TestKeepAndForget(t *testing.T) {
	m, n := startManager(t)
	s, flush := runStore(t, n, StoreOptions{})
	dir := fake.ShortDir(t)
	a, b := listen(t, filepath.Join(dir, "a")), listen(t, filepath.Join(dir, "b"))
	if err := errors.Join(s.Keep(t.Context(), "registration-a", a), s.Keep(t.Context(), "registration-b", b)); err != nil {
		t.Fatal(err)
	}
	// Closed here, open there: nobody is refused.
	a.SetUnlinkOnClose(false)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := errors.Join(s.Forget(t.Context(), "registration-a"), s.Forget(t.Context(), "never-was"), flush()); err != nil {
		t.Fatal(err)
	}
	wantStored(t, m, "registration-b")
	if c, err := net.Dial("unix", filepath.Join(dir, "a")); err == nil {
		c.Close()
		t.Error("the last copy was closed, and yet it is connected")
	}
	if err := s.Keep(t.Context(), "late", b); err == nil {
		t.Error("kept after the end of Run")
	}
}

// TestKeepReplaces checks that a descriptor takes the place of all of its name, also of those of an
// earlier process.
func TestKeepReplaces(t *testing.T) {
	m, n := startManager(t)
	first, flushFirst := runStore(t, n, StoreOptions{})
	keep(t, first, "a", "a", "b")
	second, flush := runStore(t, n, StoreOptions{})
	keep(t, second, "a")
	if err := errors.Join(flushFirst(), flush()); err != nil {
		t.Error(err)
	}
	wantStored(t, m, "b", "a")
}

func TestKeepRefusals(t *testing.T) {
	l := listen(t, filepath.Join(fake.ShortDir(t), "a"))
	none, _ := runStore(t, nil, StoreOptions{})
	if err := none.Forget(t.Context(), "x"); err != nil {
		t.Error(err)
	}
	m, n := startManager(t)
	s, flush := runStore(t, n, StoreOptions{})
	for _, name := range []string{"", "a:b", "a\nREADY=1", "ä", strings.Repeat("x", 256)} {
		if err := s.Keep(t.Context(), name, l); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
	l.Close()
	if err := s.Keep(t.Context(), "x", l); err == nil {
		t.Error("a closed listener was kept")
	}
	if err := flush(); err != nil {
		t.Error(err)
	}
	wantStored(t, m)
	if m.State().Ready != 0 {
		t.Error("a name became a message")
	}
}

// TestABusyManagerDelaysNobodyAndLosesNothing: it reads nothing while sockets are published.
func TestABusyManagerDelaysNobodyAndLosesNothing(t *testing.T) {
	m, n := startManager(t)
	s, flush := runStore(t, n, StoreOptions{})
	keep(t, s, "d")
	m.Stop()
	begun := time.Now()
	keep(t, s, "a", "b", "c")
	if err := s.Forget(t.Context(), "b"); err != nil {
		t.Error(err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Forget(done, "d"); err != nil { // without waiting
		t.Error(err)
	}
	if took := time.Since(begun); took < 4*confirmWithin || took > 4*confirmWithin+4*time.Second {
		t.Errorf("four calls took %s", took)
	}
	if got := s.unconfirmed(); !slices.Equal(got, []string{"a", "b", "c", "d"}) {
		t.Errorf("unconfirmed %q", got)
	}
	m.Continue()
	if err := flush(); err != nil {
		t.Error(err)
	}
	wantStored(t, m, "a", "c")
	if got := s.unconfirmed(); len(got) != 0 {
		t.Errorf("unconfirmed %q", got)
	}
}

// TestASlowManagerGetsAll: more messages than the kernel's queue holds, from as many drivers at
// once, before the manager reads any.
func TestASlowManagerGetsAll(t *testing.T) {
	const drivers = 400
	m, n := startManager(t)
	m.Stop()
	s, flush := runStore(t, n, StoreOptions{Max: drivers})
	l := listen(t, filepath.Join(fake.ShortDir(t), "l"))
	kept := make(chan error)
	var want []string
	for i := range drivers {
		name := fmt.Sprintf("registration-%03d", i)
		want = append(want, name)
		go func() { kept <- s.Keep(t.Context(), name, l) }()
	}
	for range drivers {
		if err := <-kept; err != nil {
			t.Error(err)
		}
	}
	m.Continue()
	if err := flush(); err != nil {
		t.Error(err)
	}
	got := m.Stored()
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("%d of %d are stored", len(got), drivers)
	}
}

// TestAFullStore checks that a full store accepts replacements of its entries and no others.
func TestAFullStore(t *testing.T) {
	m, n := startManager(t)
	m.SetMost(2)
	s, flush := runStore(t, n, StoreOptions{Max: 2})
	keep(t, s, "a", "b")
	full := func() {
		t.Helper()
		err := s.Keep(t.Context(), "c", listen(t, filepath.Join(fake.ShortDir(t), "c")))
		if !errors.Is(err, ErrStoreFull) || !strings.Contains(err.Error(), "2 of 2); raise FileDescriptorStoreMax=") {
			t.Error(err)
		}
	}
	full()
	m.Stop()
	for range 3 {
		keep(t, s, "a")
		full()
	}
	m.Continue()
	keep(t, s, "b")
	if err := s.Forget(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	keep(t, s, "c")
	if err := flush(); err != nil {
		t.Error(err)
	}
	wantStored(t, m, "b", "c")
}

// TestEachHasRoomWhenItsTurnComes: at no moment does the order of the messages need more room
// than there is, whatever is changed while the manager reads nothing.
func TestEachHasRoomWhenItsTurnComes(t *testing.T) {
	m, n := startManager(t)
	m.SetMost(2)
	s, flush := runStore(t, n, StoreOptions{Max: 2})
	keep(t, s, "a", "b")
	m.Stop()
	// Nobody waits for these: the context has ended.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := fake.ShortDir(t)
	for i := range 300 { // more than the kernel's queue holds, so that some wait in ours
		l := listen(t, filepath.Join(dir, fmt.Sprint(i)))
		out, in := []string{"a", "b", "c"}[i%3], []string{"c", "a", "b"}[i%3]
		if err := errors.Join(s.Forget(ctx, out), s.Keep(ctx, in, l)); err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	m.Continue()
	if err := flush(); err != nil {
		t.Error(err)
	}
	wantStored(t, m, "a", "b")
}

// TestHeldNamesCount: what an earlier process put in fills the store, too.
func TestHeldNamesCount(t *testing.T) {
	_, n := startManager(t)
	s, _ := runStore(t, n, StoreOptions{Max: 2, Held: []string{"a", "a"}})
	l := listen(t, filepath.Join(fake.ShortDir(t), "l"))
	if err := s.Keep(t.Context(), "b", l); !errors.Is(err, ErrStoreFull) {
		t.Error(err)
	}
	if err := errors.Join(s.Keep(t.Context(), "a", l), s.Keep(t.Context(), "b", l)); err != nil {
		t.Error(err)
	}
}

// TestTheEndNamesWhatIsNotKept: the manager never reads again. It takes the 8 s of the flush.
func TestTheEndNamesWhatIsNotKept(t *testing.T) {
	m, n := startManager(t)
	s, flush := runStore(t, n, StoreOptions{})
	m.Stop()
	keep(t, s, "a", "b")
	if err := flush(); err == nil || !strings.HasSuffix(err.Error(), ": a, b") {
		t.Error(err)
	}
}

// TestAManagerThatIsAwayIsTriedAgain: its socket is not there yet.
func TestAManagerThatIsAwayIsTriedAgain(t *testing.T) {
	dir := fake.ShortDir(t)
	s, flush := runStore(t, newNotifier(t, filepath.Join(dir, "notify")), StoreOptions{})
	keep(t, s, "a")
	m, err := fake.StartManager(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := flush(); err != nil {
		t.Error(err)
	}
	wantStored(t, m, "a")
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func TestStoreMax(t *testing.T) {
	for _, c := range []struct {
		getenv func(string) string
		want   int
	}{
		{env("FDSTORE", "4096"), 4096},
		{env("FDSTORE", "4096", "CSI_REGISTRAR_FDSTORE", "512"), 4096},
		{env("CSI_REGISTRAR_FDSTORE", "512"), 512},
		{env("FDSTORE", "x"), 0},
		{env("FDSTORE", "-1"), 0},
		{env(), 0},
	} {
		if got := StoreMax(c.getenv); got != c.want {
			t.Errorf("%d, want %d", got, c.want)
		}
	}
}

// TestSurvivesTheProcess plays restarts: each process adopts the listener of the one
// before, or makes it, answers one client and is killed. Clients that come in between wait.
func TestSurvivesTheProcess(t *testing.T) {
	m, _ := startManager(t)
	path := filepath.Join(fake.ShortDir(t), "s")
	var inode os.FileInfo
	for round := range 5 {
		cmd := m.Command(t.Context(), os.Args[0])
		cmd.Env = append(cmd.Env, "SYSTEMD_TEST_SERVE="+path)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for event := range m.Events() {
			if event == "READY=1" {
				break
			}
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if inode != nil && !os.SameFile(inode, info) {
			t.Error("another inode")
		}
		inode = info
		if got, want := ask1(t, dial(t, path)), fmt.Sprintf("adopted=%v\n", round > 0); got != want {
			t.Errorf("round %d: %q, want %q", round, got, want)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		dial(t, path)  // waits in the queue, never answered
	}
	if got := m.Stored(); !slices.Equal(got, []string{"test"}) {
		t.Errorf("stored %q", got)
	}
}

func dial(t *testing.T, path string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func ask1(t *testing.T, c net.Conn) string {
	t.Helper()
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// TestMain lets the test binary be a small service.
func TestMain(m *testing.M) {
	var service func() error
	if path := os.Getenv("SYSTEMD_TEST_SERVE"); path != "" {
		service = func() error { return serve(path) }
	} else if os.Getenv("SYSTEMD_TEST_RECEIVE") != "" {
		service = printReceived
	} else {
		fake.Main(m)
	}
	if err := service(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(path string) error {
	n := NewNotifier(os.Getenv)
	s := NewStore(n, StoreOptions{Log: slog.Default()})
	go s.Run(context.Background()) // until the process is killed
	var l net.Listener
	var err error
	files := Receive() // of one name, "test"
	if len(files) > 0 {
		if l, err = net.FileListener(files[0]); err != nil {
			return err
		}
	} else {
		made, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		if err := s.Keep(context.Background(), "test", made); err != nil {
			return err
		}
		l = made
	}
	if err := n.Ready(); err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		fmt.Fprintf(c, "adopted=%v\n", len(files) > 0)
		c.Close()
	}
}

// TestFailedBarriersKeepNoDescriptor: a manager that is away for long costs nothing.
func TestFailedBarriersKeepNoDescriptor(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it would close them
	s := NewStore(newNotifier(t, filepath.Join(fake.ShortDir(t), "none")), StoreOptions{Log: slog.New(slog.DiscardHandler)})
	before := fake.Descriptors(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*sendPause)
	defer cancel()
	if s.barrier(ctx) {
		t.Error("a barrier without a manager")
	}
	if after := fake.Descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}
