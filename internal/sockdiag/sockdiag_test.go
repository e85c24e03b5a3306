package sockdiag

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestConnections(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "sd") // t.TempDir can be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path, other := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	beside, err := net.Listen("unix", other)
	if err != nil {
		t.Fatal(err)
	}
	defer beside.Close()
	want := func(what string, n int) {
		t.Helper()
		if got, err := Connections(path); got != n || err != nil {
			t.Errorf("%s: %d, %v; want %d", what, got, err, n)
		}
	}
	dial := func(path string) net.Conn {
		t.Helper()
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	want("nobody", 0)
	queued := dial(path)
	want("one in the queue", 1)
	defer dial(other).Close()
	want("one at another socket", 1)
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	want("it is accepted", 1)
	link := filepath.Join(dir, "link")
	if err := os.Symlink("a", link); err != nil {
		t.Fatal(err)
	}
	second := dial(link)
	want("another one through a link", 2)
	second.Close()
	queued.Close()
	accepted.Close()
	if c, err := l.Accept(); err == nil { // the second
		c.Close()
	}
	want("all are closed", 0)
	if _, err := Connections(filepath.Join(dir, "none")); err == nil {
		t.Error("no error for a socket that is not there")
	}
	if _, err := Connections(dir); err == nil {
		t.Error("no error for a directory")
	}
}
