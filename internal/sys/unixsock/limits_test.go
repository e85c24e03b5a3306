package unixsock

import (
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// TestLongestPath checks that a path of 107 bytes is accepted, by CheckPath and by the kernel, and
// one of 108 bytes is not.
func TestLongestPath(t *testing.T) {
	dir := fake.ShortDir(t)
	path := dir + "/" + strings.Repeat("x", 107-len(dir)-1)
	if err := CheckPath(path); err != nil {
		t.Error(err)
	}
	l, f, err := Listen(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if f.Mode&0o777 != 0o600 || !f.IsSocket() {
		t.Errorf("mode %o", f.Mode)
	}
	if CheckPath(path+"x") == nil {
		t.Error("108 bytes are accepted")
	}
}

// TestProbeFullQueue checks that a listener that accepts nothing and whose queue is full counts as
// live: it must not be removed.
func TestProbeFullQueue(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "s")
	fd := bound(t, path)
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	full := false
	for range 10 {
		c, err := net.Dial("unix", path)
		if errors.Is(err, unix.EAGAIN) {
			full = true
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if !full {
		t.Fatal("the queue is not full")
	}
	removed, err := Vacate(t.Context(), path)
	if held, ok := errors.AsType[*InUse](err); removed || !ok || !held.Live || held.PID != 0 {
		t.Errorf("removed %t, %v", removed, err)
	}
}
