package systemd

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestKeepAndForget(t *testing.T) {
	m, n := startManager(t)
	s := NewStore(n)
	dir := shortDir(t)
	a, b := listen(t, filepath.Join(dir, "a")), listen(t, filepath.Join(dir, "b"))
	if err := errors.Join(s.Keep(t.Context(), "registration-a", a), s.Keep(t.Context(), "registration-b", b)); err != nil {
		t.Fatal(err)
	}
	if got := m.Stored(); !slices.Equal(got, []string{"registration-a", "registration-b"}) {
		t.Fatalf("stored %q", got)
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
	if err := s.Forget(t.Context(), "registration-a"); err != nil {
		t.Fatal(err)
	}
	if got := m.Stored(); !slices.Equal(got, []string{"registration-b"}) {
		t.Errorf("stored %q", got)
	}
	if c, err := net.Dial("unix", filepath.Join(dir, "a")); err == nil {
		c.Close()
		t.Error("the last copy was closed, and yet it is connected")
	}
	if err := s.Forget(t.Context(), "never-was"); err != nil {
		t.Error(err)
	}
}

func TestKeepRefusals(t *testing.T) {
	l := listen(t, filepath.Join(shortDir(t), "a"))
	if err := NewStore(nil).Keep(t.Context(), "x", l); !errors.Is(err, ErrNoStore) {
		t.Error(err)
	}
	if err := NewStore(nil).Forget(t.Context(), "x"); err != nil {
		t.Error(err)
	}
	m, n := startManager(t)
	s := NewStore(n)
	for _, name := range []string{"", "a:b", "a\nREADY=1", "ä", strings.Repeat("x", 256)} {
		if err := s.Keep(t.Context(), name, l); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
	if got := m.Stored(); len(got) != 0 || m.State().Ready != 0 {
		t.Errorf("stored %q", got)
	}
	l.Close()
	if err := s.Keep(t.Context(), "x", l); err == nil {
		t.Error("a closed listener was kept")
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Keep(done, "x", listen(t, filepath.Join(shortDir(t), "b"))); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestKeepTellsThatTheStoreIsFull(t *testing.T) {
	m, n := startManager(t)
	m.SetMost(2)
	s := NewStore(n)
	s.count = func(context.Context) (uint32, uint32, error) { return uint32(len(m.Stored())), 2, nil }
	dir := shortDir(t)
	for _, name := range []string{"a", "b"} { // the second fills it
		if err := s.Keep(t.Context(), name, listen(t, filepath.Join(dir, name))); err != nil {
			t.Fatal(err)
		}
	}
	err := s.Keep(t.Context(), "c", listen(t, filepath.Join(dir, "c")))
	if !errors.Is(err, ErrStoreFull) || !strings.Contains(err.Error(), "FileDescriptorStoreMax=2") {
		t.Error(err)
	}
	if got := m.Stored(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("stored %q", got)
	}
	// A manager that cannot be asked is believed.
	s.count = func(context.Context) (uint32, uint32, error) { return 0, 0, errNobodyToAsk }
	if err := s.Keep(t.Context(), "d", listen(t, filepath.Join(dir, "d"))); err != nil {
		t.Error(err)
	}
}

// TestOnlyTheRealManagerIsAsked: a count of another service's store would be wrong.
func TestOnlyTheRealManagerIsAsked(t *testing.T) {
	if NewStore(&Notifier{addr: "/tmp/x"}).count != nil || NewStore(&Notifier{addr: realNotify}).count == nil {
		t.Error("wrong one asked")
	}
}

// TestSurvivesTheProcess plays restarts: each process adopts the listener of the one
// before, or makes it, answers one client and is killed. Clients that come in between wait.
func TestSurvivesTheProcess(t *testing.T) {
	m, _ := startManager(t)
	path := filepath.Join(shortDir(t), "s")
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
	if path := os.Getenv("SYSTEMD_TEST_SERVE"); path != "" {
		if err := serve(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	before := openDescriptors()
	code := m.Run()
	for range 1000 { // one that has done its work may not have gone yet
		if runtime.NumGoroutine() == 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if left := openDescriptors() - before; code == 0 && !fuzzing() && (runtime.NumGoroutine() > 1 || left > 2) { // two: the poller
		fmt.Fprintf(os.Stderr, "left behind: %d goroutines, %d descriptors\n", runtime.NumGoroutine()-1, left)
		code = 1
	}
	os.Exit(code)
}

// fuzzing has workers and files of its own.
func fuzzing() bool { return flag.Lookup("test.fuzz").Value.String() != "" }

func openDescriptors() int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(all)
}

func serve(path string) error {
	h, err := Receive(os.Getenv)
	if err != nil {
		return err
	}
	if err := Unset(); err != nil {
		return err
	}
	n := NewNotifier(os.Getenv)
	var l net.Listener
	files := h.Take("test")
	if len(files) > 0 {
		if l, err = net.FileListener(files[0]); err != nil {
			return err
		}
	} else {
		made, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		if err := NewStore(n).Keep(context.Background(), "test", made); err != nil {
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
