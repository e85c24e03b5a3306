package pluginreg

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"csi-registrar/internal/test/fake"
)

// The kubelet ignores names that begin with a dot, and everything below such a directory.
func TestSocketsThatTheKubeletSees(t *testing.T) {
	dir := fake.ShortDir(t)
	for _, name := range []string{"sub/deeper", ".hidden"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a.sock", "sub/deeper/b.sock", ".c.sock", ".hidden/d.sock"} {
		l, err := net.Listen("unix", filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a.sock", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	got := Sockets(dir)
	slices.Sort(got)
	want := []string{filepath.Join(dir, "a.sock"), filepath.Join(dir, "link"), filepath.Join(dir, "sub/deeper/b.sock")}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
