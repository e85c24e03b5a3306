package systemd

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

func startManager(t *testing.T) (*fake.Manager, *Notifier) {
	t.Helper()
	m, err := fake.StartManager(fake.ShortDir(t))
	if err != nil {
		t.Fatal(err)
	}
	n := newNotifier(t, m.SocketPath())
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, n
}

func newNotifier(t *testing.T, path string) *Notifier {
	n := NewNotifier(env("NOTIFY_SOCKET", path))
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func TestNotifierSays(t *testing.T) {
	m, n := startManager(t)
	if err := n.Watchdog(); err != nil {
		t.Fatal(err)
	}
	for _, s := range []struct {
		call func() error
		want string
	}{
		{n.Ready, "READY=1"},
		{func() error { return n.Status("2 drivers\nall registered") }, "STATUS=2 drivers all registered"},
		{n.Stopping, "STOPPING=1"},
	} {
		if err := s.call(); err != nil {
			t.Fatal(err)
		}
		if got := <-m.Events(); got != s.want {
			t.Errorf("received %q, want %q", got, s.want)
		}
	}
	if got := m.State(); got.Ready != 1 || got.Watchdog != 1 || !got.Stopping {
		t.Errorf("%+v", got)
	}
}

func TestNilNotifier(t *testing.T) {
	n := NewNotifier(env())
	if n != nil {
		t.Fatal("a notifier without NOTIFY_SOCKET")
	}
	if err := errors.Join(n.Ready(), n.Stopping(), n.Status("x"), n.Watchdog()); err != nil {
		t.Error(err)
	}
}

func TestNotifierWithoutListener(t *testing.T) {
	n := newNotifier(t, filepath.Join(fake.ShortDir(t), "none"))
	if err := n.Ready(); err == nil || !strings.Contains(err.Error(), "READY") {
		t.Error(err)
	}
}

// TestNotifierDoesNotHangWithTheManager: nobody reads, and the kernel's queue is full.
func TestNotifierDoesNotHangWithTheManager(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "deaf")
	deaf, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	n := newNotifier(t, path)
	if err := fake.FillDatagrams(path); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if err := n.Watchdog(); err == nil || !strings.Contains(err.Error(), "WATCHDOG") {
		t.Error(err)
	}
	if took := time.Since(begun); took > 4*sendTimeout {
		t.Errorf("it took %s", took)
	}
}

// TestNotifierWithoutDescriptors: a process that has none left feeds its watchdog, also when the
// manager's socket was recreated.
func TestNotifierWithoutDescriptors(t *testing.T) {
	dir := fake.ShortDir(t)
	first, err := fake.StartManager(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := newNotifier(t, first.SocketPath())
	if err := errors.Join(n.Watchdog(), first.Close(), os.Remove(first.SocketPath())); err != nil {
		t.Fatal(err)
	}
	second, err := fake.StartManager(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	err = n.Ready()
	if err := errors.Join(err, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)); err != nil {
		t.Fatal(err)
	}
	if got := <-second.Events(); got != "READY=1" {
		t.Errorf("received %q", got)
	}
}
