package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"csi-registrar/internal/config"
	"csi-registrar/internal/kubelet"
)

// forgetful is a descriptor store that remembers what it was told to forget.
type forgetful struct{ names []string }

func (*forgetful) Keep(context.Context, string, syscall.Conn) error { return nil }
func (s *forgetful) Forget(_ context.Context, name string) error {
	s.names = append(s.names, name)
	return nil
}

// A daemon that is stopped while it begins leaves a kept listener as it is, or withdraws it
// wholly: one that was forgotten with its path in place would be a dead socket for ever.
func TestStoppedWhileWithdrawing(t *testing.T) {
	for _, stopped := range []bool{true, false} {
		dir, err := os.MkdirTemp("", "p")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		path := filepath.Join(dir, "plugins_registry", "foo.example-reg.sock")
		if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		if err := errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		store := &forgetful{}
		p := &parts{
			log: slog.New(slog.DiscardHandler), registries: map[string]*kubelet.Registry{},
			stored: map[string][]*os.File{"foo.example": {f}}, options: kubelet.Options{Store: store},
		}
		c := config.Default()
		c.Kubelet.RootDir = dir
		ctx, stop := context.WithCancel(t.Context())
		if stopped {
			stop()
		}
		err = p.withdrawUnclaimed(ctx, c)
		stop()
		_, there := os.Lstat(path)
		switch {
		case stopped && (!errors.Is(err, context.Canceled) || there != nil || len(store.names) != 0 || len(p.stored) != 1):
			t.Errorf("stopped: %v, path %v, forgotten %q, kept %d", err, there, store.names, len(p.stored))
		case !stopped && (err != nil || !errors.Is(there, os.ErrNotExist) || len(store.names) == 0 || len(p.stored) != 0):
			t.Errorf("not stopped: %v, path %v, forgotten %q, kept %d", err, there, store.names, len(p.stored))
		}
		if err := p.close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
