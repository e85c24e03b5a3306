package systemd

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// TestSupersededKeepIsClosed checks that the copy of a Keep that another one of the same name
// replaced is closed: the manager may not read for hours.
func TestSupersededKeepIsClosed(t *testing.T) {
	s := NewStore(NewNotifier(func(string) string { return "/nowhere" }), StoreOptions{Log: slog.New(slog.DiscardHandler)})
	defer s.notify.Close()
	first, second := newDescriptor(t), newDescriptor(t)
	for _, fd := range []int{first, second} {
		if _, err := s.enqueue("a", fd); err != nil {
			t.Fatal(err)
		}
	}
	if isOpen(first) || !isOpen(second) {
		t.Errorf("open: first %v, second %v", isOpen(first), isOpen(second))
	}
	s.end() // of Run: nothing is sent any more
	if isOpen(second) {
		t.Error("what was never sent is open")
	}
	if _, err := s.enqueue("a", -1); err == nil {
		t.Error("it takes more")
	}
}

func newDescriptor(t *testing.T) int {
	t.Helper()
	fd, err := unix.Open("/dev/null", unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

func isOpen(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return err == nil
}

// TestFailedBarrierClosesItsPipe checks that each try of a barrier that cannot be sent closes both
// ends of its pipe: it is tried until it works, and the daemon may have no more descriptors.
func TestFailedBarrierClosesItsPipe(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	n := NewNotifier(func(string) string { return path })
	defer n.Close()
	if err := l.Close(); err != nil { // nobody receives any more
		t.Fatal(err)
	}
	fake.CheckLeaks(t)
	s := NewStore(n, StoreOptions{Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithTimeout(t.Context(), 5*sendPause/2)
	defer cancel()
	if s.barrier(ctx) {
		t.Error("it was confirmed")
	}
}

// TestFullStoreAtItsLimit checks that a store with room for one takes one, and closes its copy of
// the second.
func TestFullStoreAtItsLimit(t *testing.T) {
	s := NewStore(NewNotifier(func(string) string { return "/nowhere" }), StoreOptions{Max: 1, Log: slog.New(slog.DiscardHandler)})
	defer s.notify.Close()
	defer s.end()
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // waits for nobody
	if err := s.Keep(ctx, "a", file); err != nil {
		t.Fatal(err)
	}
	before := fake.Descriptors(t)
	if err := s.Keep(ctx, "b", file); err == nil {
		t.Error("it takes two")
	}
	if after := fake.Descriptors(t); after != before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}

// TestStatusIsOneLine checks that no kind of line break ends STATUS=: the rest would be another
// message.
func TestStatusIsOneLine(t *testing.T) {
	m, n := startManager(t)
	if err := n.Status("one\ntwo\rthree\r\nfour"); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); m.State().Status == "" && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if got, want := m.State().Status, "one two three  four"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
