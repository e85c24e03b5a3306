package unixsock

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// bound creates a socket at path without a listener.
func bound(t *testing.T, path string) (fd int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: path})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// A socket that changes between the two probes is in use, whatever it is then.
func TestStaleSocketThatChangesIsLeft(t *testing.T) {
	for name, change := range map[string]func(path string, fd int) error{
		"somebody listens": func(_ string, fd int) error { return unix.Listen(fd, 5) },
		"a live one replaces it": func(path string, _ int) error {
			l, err := net.Listen("unix", path+".new")
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return errors.Join(err, os.Rename(path+".new", path))
		},
		// as if a new one had its inode number
		"its time of change differs": func(path string, _ int) error { return os.Chmod(path, 0o640) },
		"a stale one replaces it": func(path string, _ int) error {
			err := os.Remove(path)
			bound(t, path)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fake.ShortDir(t)
			path := filepath.Join(dir, "a")
			fd := bound(t, path)
			before, err := Lstat(path)
			if err := errors.Join(err, change(path, fd)); err != nil {
				t.Fatal(err)
			}
			removed, err := removeStale(t.Context(), path, before)
			if _, inUse := errors.AsType[*InUse](err); removed || !inUse {
				t.Errorf("removed %t, %v", removed, err)
			}
			if _, err := os.Lstat(path); err != nil {
				t.Error(err)
			}
		})
	}
}

// An old socket is removed at once, so that a start after a power cut does not delay the kubelet.
func TestOnlyYoungSocketsAreWaitedFor(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct{ age, want time.Duration }{
		"of the boot before":     {time.Hour, 0},
		"old enough":             {250 * time.Millisecond, 0},
		"young":                  {150 * time.Millisecond, 100 * time.Millisecond},
		"just made":              {0, 250 * time.Millisecond},
		"the clock was set back": {-time.Hour, 250 * time.Millisecond},
	} {
		if got := max(0, untilStale(File{Changed: now.Add(-c.age).UnixNano()}, now)); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
