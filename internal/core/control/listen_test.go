package control

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// staleSocket leaves a socket at the path that nobody listens on.
func staleSocket(t *testing.T, path string) {
	t.Helper()
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		if e.Name() != ".control.lock" {
			out = append(out, e.Name())
		}
	}
	return strings.Join(out, " ")
}

func TestListen(t *testing.T) {
	fake.CheckLeaks(t)
	dir := filepath.Join(fake.ShortDir(t), "run", "csi-registrar")
	path := filepath.Join(dir, "control.sock")
	ln, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket: %v %v", fi.Mode(), err)
	}
	if got := names(t, dir); got != "control.sock" {
		t.Errorf("the directory has %s", got)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := errors.Join(ln.Close(), ln.Close()); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); got != "" {
		t.Errorf("left behind: %s", got)
	}
}

func TestListenReplacesAStaleSocket(t *testing.T) {
	fake.CheckLeaks(t)
	dir := fake.ShortDir(t)
	path := filepath.Join(dir, "control.sock")
	staleSocket(t, path)
	ln, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if got := names(t, dir); got != "control.sock" {
		t.Errorf("the directory has %s", got)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestListenBesideALiveDaemon(t *testing.T) {
	fake.CheckLeaks(t)
	path, _ := served(t, newDaemon())
	ln, err := Listen(t.Context(), path)
	if !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), "process ") {
		t.Fatalf("%v %v", ln, err)
	}
	if _, err := NewClient(path).Status(t.Context()); err != nil {
		t.Errorf("the live one: %v", err)
	}
	if got := names(t, filepath.Dir(path)); got != "control.sock" {
		t.Errorf("the directory has %s", got)
	}
}

func TestListenKeepsOtherFiles(t *testing.T) {
	fake.CheckLeaks(t)
	dir := fake.ShortDir(t)
	path := filepath.Join(dir, "control.sock")
	for name, make := range map[string]func() error{
		"a file":      func() error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a directory": func() error { return os.Mkdir(path, 0o700) },
		"a link":      func() error { return os.Symlink("/nowhere", path) },
	} {
		if err := make(); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if ln, err := Listen(t.Context(), path); err == nil || !strings.Contains(err.Error(), " has that name: move it away") {
			t.Errorf("%s: %v %v", name, ln, err)
		}
		after, err := os.Lstat(path)
		if err != nil || !os.SameFile(before, after) {
			t.Errorf("%s was touched: %v", name, err)
		}
		if got := names(t, dir); got != "control.sock" {
			t.Errorf("%s: the directory has %s", name, got)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// Close does not remove a file that replaced its own.
func TestCloseKeepsAnotherSocket(t *testing.T) {
	fake.CheckLeaks(t)
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	first, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// Of many daemons that start at once over a stale socket, one gets the path, the others get
// ErrRunning, and no other file is left.
func TestListenRace(t *testing.T) {
	fake.CheckLeaks(t)
	for range 50 {
		dir := fake.ShortDir(t)
		path := filepath.Join(dir, "control.sock")
		staleSocket(t, path)
		const n = 8
		lns, errs := make([]net.Listener, n), make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { lns[i], errs[i] = Listen(t.Context(), path) })
		}
		wg.Wait()
		won := 0
		for i := range n {
			if errs[i] == nil {
				won++
			} else if !errors.Is(errs[i], ErrRunning) {
				t.Error(errs[i])
			}
		}
		if got := names(t, dir); won != 1 || got != "control.sock" {
			t.Errorf("%d listen; the directory has %s", won, got)
		}
		for _, ln := range lns {
			if ln != nil {
				if c, err := net.Dial("unix", path); err != nil {
					t.Error(err)
				} else {
					c.Close()
				}
				ln.Close()
			}
		}
	}
}

func TestListenWithTheLongestPath(t *testing.T) {
	fake.CheckLeaks(t)
	dir := fake.ShortDir(t)
	dir = filepath.Join(dir, strings.Repeat("d", 107-len(dir)-len("//control.sock")))
	path := filepath.Join(dir, "control.sock")
	if len(path) != 107 {
		t.Fatal(len(path))
	}
	ln, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if _, err := Listen(t.Context(), path+"x"); err == nil {
		t.Error("a path of 108 bytes was accepted")
	}
}

// Only the owner can open the lock, because the daemon does not start while another process holds
// it. A link in its place is not followed.
func TestListenLock(t *testing.T) {
	fake.CheckLeaks(t)
	dir := fake.ShortDir(t)
	ln, err := Listen(t.Context(), filepath.Join(dir, "control.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	lock := filepath.Join(dir, ".control.lock")
	if fi, err := os.Stat(lock); err != nil || fi.Mode() != 0o600 {
		t.Errorf("the lock has mode %v (%v)", fi.Mode(), err)
	}
	target := filepath.Join(dir, "target")
	if err := errors.Join(ln.Close(), os.Remove(lock), os.Symlink(target, lock)); err != nil {
		t.Fatal(err)
	}
	if ln, err := Listen(t.Context(), filepath.Join(dir, "control.sock")); !errors.Is(err, unix.ELOOP) {
		t.Errorf("%v, %v", ln, err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the link was followed: %v", err)
	}
}
