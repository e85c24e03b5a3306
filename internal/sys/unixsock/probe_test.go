package unixsock

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
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
		"a stale one replaces it": func(path string, _ int) error {
			err := os.Remove(path)
			bound(t, path)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fake.ShortDir(t)
			path, same := filepath.Join(dir, "a"), filepath.Join(dir, "b")
			fd := bound(t, path)
			bound(t, same)
			before := staleAmong(t.Context(), []string{path, same})
			if len(before) != 2 {
				t.Fatalf("%v", before)
			}
			if err := change(path, fd); err != nil {
				t.Fatal(err)
			}
			if removed, err := removeUnchanged(t.Context(), before); err != nil || !slices.Equal(removed, []string{same}) {
				t.Errorf("removed %v, %v", removed, err)
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
	aged := func(age time.Duration) File { return File{Changed: now.Add(-age).UnixNano()} }
	for name, c := range map[string]struct {
		files map[string]File
		want  time.Duration
	}{
		"of the boot before":     {map[string]File{"a": aged(time.Hour), "b": aged(staleFor)}, 0},
		"one is young":           {map[string]File{"a": aged(time.Hour), "b": aged(staleFor / 4)}, staleFor * 3 / 4},
		"just made":              {map[string]File{"a": aged(0)}, staleFor},
		"the clock was set back": {map[string]File{"a": aged(-time.Hour)}, staleFor},
	} {
		if got := untilStale(c.files, now); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
