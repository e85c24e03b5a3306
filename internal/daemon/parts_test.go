package daemon

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"csi-registrar/internal/config"
	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/worker"
)

// noHints is a watch of nothing.
type noHints struct{}

func (noHints) Hint()                  {}
func (noHints) Hints() <-chan struct{} { return nil }
func (noHints) Close()                 {}

// What was disabled while no daemon ran is withdrawn at the start as what was removed.
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
	dir, err := os.MkdirTemp("", "p")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
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
		registries: map[string]*kubelet.Registry{},
		stored:     map[string][]*os.File{"a.example": {kept}},
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
