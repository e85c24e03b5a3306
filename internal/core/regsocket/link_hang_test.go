package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/worker"
)

// The file system of the links stops answering while a trace begins. The abandoned call continues
// after the trace has ended, and must not point the link to the recorder then.
func TestTraceThatTheFileSystemDelaysLeavesNothingBehind(t *testing.T) {
	w := newWorld(t)
	dir := rootdir.EndpointLinks(w.root)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	fs, err := fake.MountHangFS(dir)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	r := w.open()
	s := socket(t, r, "a")
	if err := s.Publish(t.Context(), w.linked("a")); err != nil {
		t.Fatal(err)
	}
	var recorder string
	err = s.Record(t.Context(), func(_ context.Context, path string) error {
		recorder = path
		l, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false) // that would hang, too
		return errors.Join(fs.Hang(), l.Close())
	}, func() { t.Error("linked") })
	if _, ok := errors.AsType[*worker.NotAnswering](err); !ok {
		t.Fatalf("the trace ended with %v", err)
	}
	if err := fs.Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the abandoned call returns", func() bool { return len(r.o.Pool.Stuck()) == 0 })
	w.wantLink("a", "/run/a/csi.sock")
	if s.Look().Traced {
		t.Error("it is still shown as traced")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("the directory of the links has %v, %v", entries, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	err = s.Record(ctx, func(_ context.Context, path string) error {
		l, err := net.Listen("unix", path)
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}, stop)
	if err != nil {
		t.Errorf("the next trace of %s: %v", filepath.Base(recorder), err)
	}
}
