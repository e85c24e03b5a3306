package systemd

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/systemd/systemdtest"
)

func startManager(t *testing.T) (*systemdtest.Manager, *Notifier) {
	t.Helper()
	m, err := systemdtest.Start(shortDir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, NewNotifier(env("NOTIFY_SOCKET", m.SocketPath()))
}

func TestNotifierSays(t *testing.T) {
	m, n := startManager(t)
	say := []struct {
		say  func() error
		want string
	}{
		{n.Ready, "READY=1"},
		{func() error { return n.Status("2 drivers\nall registered") }, "STATUS=2 drivers all registered"},
		{n.Reloading, "RELOADING=1"},
		{func() error { return nil }, "MONOTONIC_USEC="},
		{func() error { return n.ExtendTimeout(2 * time.Second) }, "EXTEND_TIMEOUT_USEC=2000000"},
		{n.Stopping, "STOPPING=1"},
	}
	for _, s := range say {
		if err := s.say(); err != nil {
			t.Fatal(err)
		}
		got := <-m.Events()
		if got != s.want && !(strings.HasSuffix(s.want, "_USEC=") && strings.HasPrefix(got, s.want)) {
			t.Errorf("heard %q, want %q", got, s.want)
		}
	}
	if err := errors.Join(n.Watchdog(), n.Barrier(t.Context())); err != nil {
		t.Fatal(err)
	}
	if got := m.State(); got.Ready != 1 || got.Watchdog != 1 || got.Reloading != 1 || !got.Stopping {
		t.Errorf("%+v", got)
	}
}

func TestNilNotifier(t *testing.T) {
	n := NewNotifier(env())
	if n != nil {
		t.Fatal("a notifier without NOTIFY_SOCKET")
	}
	if err := errors.Join(n.Ready(), n.Reloading(), n.Stopping(), n.Status("x"), n.Watchdog(),
		n.ExtendTimeout(1), n.Barrier(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestNotifierWithoutListener(t *testing.T) {
	n := NewNotifier(env("NOTIFY_SOCKET", filepath.Join(shortDir(t), "none")))
	if err := n.Ready(); err == nil || !strings.Contains(err.Error(), "READY") {
		t.Error(err)
	}
	if err := n.Barrier(t.Context()); err == nil {
		t.Error("no error")
	}
}

func TestBarrierEndsWithContext(t *testing.T) {
	path := filepath.Join(shortDir(t), "deaf")
	deaf, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	n := NewNotifier(env("NOTIFY_SOCKET", path))
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		_, _, _ = deaf.ReadFrom(make([]byte, 100)) // the barrier is there: its copy stays open in flight
		cancel(cause)
	}()
	// Read with ReadFrom, the descriptor is dropped by the kernel and the barrier ends;
	// either way Barrier must return.
	if err := n.Barrier(ctx); err != nil && !errors.Is(err, cause) {
		t.Error(err)
	}
	cancel(cause)
	if err := n.Barrier(ctx); !errors.Is(err, cause) {
		t.Errorf("%v, want %v", err, cause)
	}
}

func TestWatchdogInterval(t *testing.T) {
	for _, c := range []struct {
		usec, pid string
		want      time.Duration
	}{
		{"20000000", "", 20 * time.Second},
		{"20000000", pid(), 20 * time.Second},
		{"20000000", "1", 0},
		{"", "", 0},
		{"0", "", 0},
		{"-5", "", 0},
		{"x", "", 0},
		{"99999999999999999", "", 0},
	} {
		got, ok := WatchdogInterval(env("WATCHDOG_USEC", c.usec, "WATCHDOG_PID", c.pid))
		if got != c.want || ok != (c.want > 0) {
			t.Errorf("%q for %q: %v, %v", c.usec, c.pid, got, ok)
		}
	}
}
