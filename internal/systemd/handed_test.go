package systemd

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// testFirst is where the tests put "inherited" descriptors: the real place is taken by
// the Go runtime and the test binary.
const testFirst = 300

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

func pid() string { return strconv.Itoa(os.Getpid()) }

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// inherit puts a copy of the listener at descriptor fd, without close-on-exec.
func inherit(t *testing.T, l *net.UnixListener, fd int) {
	t.Helper()
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var dup error
	if err := raw.Control(func(from uintptr) { dup = unix.Dup3(int(from), fd, 0) }); err != nil || dup != nil {
		t.Fatal(err, dup)
	}
}

func TestReceiveByName(t *testing.T) {
	dir := shortDir(t)
	for i, name := range []string{"a", "b", "c"} {
		inherit(t, listen(t, filepath.Join(dir, name)), testFirst+i)
	}
	h, err := receive(env("LISTEN_PID", pid(), "LISTEN_FDS", "3", "LISTEN_FDNAMES", "x:control:x"), testFirst)
	if err != nil {
		t.Fatal(err)
	}
	for fd := testFirst; fd < testFirst+3; fd++ {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %d: flags %v, %v; want close-on-exec", fd, flags, err)
		}
	}
	if got := h.Names(); !slices.Equal(got, []string{"control", "x"}) {
		t.Errorf("names %q", got)
	}
	control := h.Take("control")
	if len(control) != 1 || len(h.Take("control")) != 0 {
		t.Fatal("control must be there once")
	}
	l, err := net.FileListener(control[0])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got := l.Addr().String(); got != filepath.Join(dir, "b") {
		t.Errorf("control is %s", got)
	}
	if err := control[0].Close(); err != nil {
		t.Error(err)
	}
	raw, err := l.(*net.UnixListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if flags, err := unix.FcntlInt(fd, unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK == 0 {
			t.Errorf("flags %#x, %v: the shared socket must stay non-blocking", flags, err)
		}
	}); err != nil {
		t.Error(err)
	}
	rest := h.Rest()
	if len(rest) != 2 || rest[0].Name() != "x" || len(h.Rest()) != 0 {
		t.Errorf("rest: %v", rest)
	}
	for _, f := range rest {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestReceiveNothing(t *testing.T) {
	for name, getenv := range map[string]func(string) string{
		"no variables":     env(),
		"of somebody":      env("LISTEN_PID", "1", "LISTEN_FDS", "2"),
		"no number":        env("LISTEN_PID", pid(), "LISTEN_FDNAMES", "x"),
		"number is zero":   env("LISTEN_PID", pid(), "LISTEN_FDS", "0"),
		"pid is no number": env("LISTEN_PID", "x", "LISTEN_FDS", "1"),
	} {
		h, err := receive(getenv, testFirst+50)
		if err != nil || len(h.Names()) != 0 {
			t.Errorf("%s: %v, %v", name, h.Names(), err)
		}
	}
}

func TestReceiveNonsense(t *testing.T) {
	for _, fds := range []string{"x", "-1", "99999999"} {
		if _, err := receive(env("LISTEN_PID", pid(), "LISTEN_FDS", fds), testFirst+50); err == nil {
			t.Errorf("LISTEN_FDS=%s: no error", fds)
		}
	}
	inherit(t, listen(t, filepath.Join(shortDir(t), "a")), testFirst)
	// The second is not open: the first must not leak.
	h, err := receive(env("LISTEN_PID", pid(), "LISTEN_FDS", "2"), testFirst)
	if err == nil || len(h.Names()) != 0 {
		t.Errorf("%v, %v", h.Names(), err)
	}
	if _, err := unix.FcntlInt(testFirst, unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("descriptor is open still: %v", err)
	}
}

func TestReceiveWithoutNames(t *testing.T) {
	inherit(t, listen(t, filepath.Join(shortDir(t), "a")), testFirst)
	h, err := receive(env("LISTEN_PID", pid(), "LISTEN_FDS", "1"), testFirst)
	if err != nil || !slices.Equal(h.Names(), []string{"unknown"}) {
		t.Errorf("%v, %v", h.Names(), err)
	}
	h.closeAll()
}
