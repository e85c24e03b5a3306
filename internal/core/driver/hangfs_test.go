package driver

import (
	"os"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// The file system of a registered driver's socket hangs for a while.
func TestSocketOnAFileSystemThatHangs(t *testing.T) {
	dir := fake.ShortDir(t)
	fs, err := fake.MountHangFS(dir)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { must(t, fs.Close()) })
	must(t, os.Mkdir(dir+"/d", 0o755))
	socket := dir + "/d/csi.sock"
	f := &fakeDriver{}
	stop := start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	expectReady(t, ask(t, c))
	must(t, fs.Hang())
	c.lookLimit = 50 * time.Millisecond
	for range 3 {
		if r := ask(t, c); r.Driver != status.Starting || r.Reason != "the file system of "+socket+" does not answer" {
			t.Errorf("%+v", r)
		}
	}
	must(t, fs.Resume())
	c.lookLimit = 20 * time.Second
	expectHint(t, c, "it answers again")
	expectReady(t, ask(t, c))
	expectCalls(t, f, 1)

	// It hangs during connect. A late connection is closed: client checks for descriptors that are
	// left behind.
	stop()
	expectHint(t, c, "the driver ended")
	must(t, os.Remove(socket))
	start(t, socket, f)
	must(t, fs.Hang())
	c.lookLimit = 50 * time.Millisecond
	if r := ask(t, c); r.Driver != status.Starting {
		t.Errorf("%+v", r)
	}
	c.Close()
	must(t, fs.Resume())
	expectHint(t, c, "it answers again")
}
