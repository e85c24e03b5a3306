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

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
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

// An enabled driver whose Socket is not open may still adopt what an earlier process left; a
// disabled one does not.
func TestLeftoversOfEnabledDriversStay(t *testing.T) {
	root, runDir := fake.ShortDir(t), fake.ShortDir(t)
	r, err := regsocket.Open(root, regsocket.Options{Log: slog.New(slog.DiscardHandler), RunDir: runDir, Pool: worker.NewPool(),
		Watch: func(...string) rate.Hinter { return noHints{} }})
	if err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	for name, enabled := range map[string]bool{"a.example": true, "b.example": false} {
		d := config.DefaultDriver(name, "/x")
		d.Enabled = enabled
		c.Drivers = append(c.Drivers, d)
		file := filepath.Join(runDir, "registrations", name+".json")
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(`{"path": "`+filepath.Join(root, "plugins_registry", name+"-reg.sock")+`"}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := (&parts{registry: r}).removeLeftovers(t.Context(), c, nil); err != nil {
		t.Fatal(err)
	}
	if left, err := regsocket.Recorded(runDir); err != nil || len(left) != 1 || left[filepath.Join(runDir, "registrations/a.example.json")].Path == "" {
		t.Errorf("%v, %v", left, err)
	}
}

// The stale socket of a disabled driver is not ours without a record or a listener in the store: a
// node-driver-registrar that serves the driver and restarts still has its registration.
func TestStaleSocketOfADisabledDriverStays(t *testing.T) {
	root := fake.ShortDir(t)
	r, err := regsocket.Open(root, regsocket.Options{Log: slog.New(slog.DiscardHandler), RunDir: fake.ShortDir(t), Pool: worker.NewPool(),
		Watch: func(...string) rate.Hinter { return noHints{} }})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "plugins_registry/a.example-reg.sock")
	if err := os.Mkdir(filepath.Dir(path), 0o750); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	c.Drivers = []config.Driver{config.DefaultDriver("a.example", "/x")}
	c.Drivers[0].Enabled = false
	for _, stored := range [][]string{nil, {"a.example"}} {
		if err := (&parts{registry: r}).removeLeftovers(t.Context(), c, stored); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(path); (err == nil) != (stored == nil) {
			t.Errorf("in the store %q: %v", stored, err)
		}
	}
}

// TestRecordsWithoutKeepSockets checks that what an earlier process left in the descriptor store is
// removed with its record, also by a daemon that keeps nothing.
func TestRecordsWithoutKeepSockets(t *testing.T) {
	for _, stored := range []map[string][]*os.File{nil, {"a.example": nil}} {
		o := Options{Source: config.Source{Root: t.TempDir()}, Getenv: func(string) string { return "" }}
		p := newParts(&daemon{options: o, log: slog.New(slog.DiscardHandler), handed: &descriptors{stored: stored}}, "")
		if want := len(stored) > 0; (p.options.RunDir != "") != want {
			t.Errorf("%d listeners, records in %q", len(stored), p.options.RunDir)
		}
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
	watch := func(...string) rate.Hinter { return noHints{} }
	p := &parts{
		daemon:  &daemon{log: slog.New(slog.NewTextHandler(&log, nil))},
		stored:  map[string][]*os.File{"a.example": {kept}},
		kubelet: regsocket.NewProcess(nil, "", nil),
		options: regsocket.Options{Log: slog.New(slog.DiscardHandler), Watch: watch, Pool: worker.NewPool()},
	}
	defer p.close(t.Context())
	if err := p.open(dir); err != nil {
		t.Fatal(err)
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if s, err := p.Socket(stopped, "a.example"); err == nil {
		t.Errorf("it has a socket to go on with: %v", s)
	}
	if log.Len() > 0 {
		t.Errorf("it was logged: %s", log.String())
	}
	if s, err := p.Socket(t.Context(), "a.example"); err != nil {
		t.Errorf("the name is not free: %v", err)
	} else if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
}

// With node-driver-registrar's flags the endpoint is a path of the host, at which something else
// can be in the container. Otherwise it is checked.
func TestEndpointOfAnotherMountNamespaceIsNotChecked(t *testing.T) {
	for dir, want := range map[string]status.DriverState{"/registration": status.Ready, "": status.Starting} {
		d := fake.NewDriver(filepath.Join(fake.ShortDir(t), "s"), fake.Healthy("a.example"))
		if _, err := d.Start(); err != nil {
			t.Fatal(err)
		}
		table := config.DefaultDriver("a.example", d.Socket)
		table.Endpoint, table.SocketOwner = d.Socket+".txt", trust.Anybody
		if err := os.WriteFile(table.Endpoint, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		p := &parts{daemon: &daemon{log: log, pool: worker.NewPool(), watcher: fswatch.New(log, worker.NewPool())}, options: regsocket.Options{Dir: dir}}
		o := p.Driver(table)
		o.Follow(true, false, 0)
		for o.Look().AskedAt.IsZero() {
			<-o.Hints()
		}
		if v := o.Look(); v.Driver != want {
			t.Errorf("in %q it is %s, want %s: %s", dir, v.Driver, want, v.Reason)
		}
		o.Close()
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	}
}
