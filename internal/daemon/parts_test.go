package daemon

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/sys/worker"
)

// noHints is a watch of nothing.
type noHints struct{}

func (noHints) Hint()                  {}
func (noHints) Hints() <-chan struct{} { return nil }
func (noHints) Close()                 {}

// A driver that was disabled while no daemon ran is withdrawn at the start, like a removed one.
func TestStoredListenersOfDisabledDriversAreUnclaimed(t *testing.T) {
	c := config.Default()
	c.Drivers = []config.Driver{config.DefaultDriver("a.example", "/a"), config.DefaultDriver("b.example", "/b")}
	c.Drivers[1].Enabled = false
	p := &parts{stored: map[string][]*os.File{"a.example": nil, "b.example": nil, "c.example": nil}}
	if got := p.unclaimed(c); len(got) != 2 || slices.Contains(got, "a.example") {
		t.Errorf("unclaimed: %q", got)
	}
}

// A registration socket that cannot be adopted because the daemon was asked to stop stays in the
// store for the next process: it is no reason to make a new one, nor to warn.
func TestStopWhileAdoptingStartsNoRegistrar(t *testing.T) {
	dir := fake.ShortDir(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "kept"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	kept, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	watch := func(...string) kubelet.Watch { return noHints{} }
	p := &parts{
		log:        slog.New(slog.NewTextHandler(&log, nil)),
		registries: map[string]*registry{},
		stored:     map[string][]*os.File{"a.example": {kept}},
		kubelet:    kubelet.NewProcess(kubelet.ProcessOptions{}),
		options:    kubelet.Options{Log: slog.New(slog.DiscardHandler), Watch: watch, WatchDir: func(path string) kubelet.Watch { return watch(path) }, Pool: worker.NewPool()},
	}
	defer p.close(t.Context())
	c := config.Default()
	c.Kubelet.RootDir = dir
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if s, err := p.Socket(stopped, c, "a.example"); err == nil {
		t.Errorf("it has a socket to go on with: %v", s)
	}
	if log.Len() > 0 {
		t.Errorf("it was logged: %s", log.String())
	}
	if s, err := p.Socket(t.Context(), c, "a.example"); err != nil {
		t.Errorf("the name is not free: %v", err)
	} else if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// openWatch counts watches that are open.
type openWatch struct {
	noHints
	open *atomic.Int32
}

func (w openWatch) Close() { w.open.Add(-1) }

// The registry of an earlier root_dir is closed with the last registration there.
func TestRegistriesOfAnEarlierRootDirAreClosed(t *testing.T) {
	var open atomic.Int32
	watch := func(...string) kubelet.Watch { open.Add(1); return openWatch{open: &open} }
	p := &parts{
		log:        slog.New(slog.DiscardHandler),
		registries: map[string]*registry{},
		kubelet:    kubelet.NewProcess(kubelet.ProcessOptions{}),
		options:    kubelet.Options{Log: slog.New(slog.DiscardHandler), Watch: watch, WatchDir: func(path string) kubelet.Watch { return watch(path) }, Pool: worker.NewPool()},
	}
	socket := func(root, name string) agent.Socket {
		c := config.Default()
		c.Kubelet.RootDir = root
		s, err := p.Socket(t.Context(), c, name)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	end := func(s agent.Socket) {
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	root, other := fake.ShortDir(t), fake.ShortDir(t)
	a, b := socket(root, "a.example"), socket(root, "b.example")
	end(b)
	moved := socket(other, "a.example")
	if n := open.Load(); n != 4 {
		t.Errorf("%d watches, want one for each registry and socket", n)
	}
	end(a) // withdrawn
	p.closing.Wait()
	if n := open.Load(); n != 2 {
		t.Errorf("%d watches, want those of the root_dir in force", n)
	}
	end(moved)
	end(socket(other, "a.example")) // its registry stays, and is used again
	p.closing.Wait()
	if n := open.Load(); n != 1 {
		t.Errorf("%d watches, want the one of the registry in force", n)
	}
	if err := p.close(t.Context()); err != nil || open.Load() != 0 {
		t.Errorf("%d watches, error %v", open.Load(), err)
	}
}
