package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/test/fake"
)

// daemon is a Backend whose state the test sets.
type daemon struct {
	mu        sync.Mutex
	status    status.Document
	changed   chan struct{}
	reloadErr error
	regErr    error
	aliveErr  error
	liveErr   error
	asked     []string // names passed to Reregister
}

func newDaemon(drivers ...status.Driver) *daemon {
	return &daemon{
		changed: make(chan struct{}),
		status: status.Document{
			Version: "1.2.3", StartedAt: at(0), ConfigFiles: []safetext.Claim{"/etc/csi-registrar/config.toml"},
			PluginsRegistry: "/var/lib/kubelet/plugins_registry", Drivers: drivers,
		},
	}
}

func (d *daemon) Status() status.Document {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status
}

func (d *daemon) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

func (d *daemon) set(f func(*status.Document)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(&d.status)
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *daemon) Reload(_ context.Context, force bool) ([]string, error) {
	return []string{fmt.Sprintf("force %t", force)}, d.reloadErr
}

func (d *daemon) Reregister(_ context.Context, name string, force bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asked = append(d.asked, name); force {
		d.asked[len(d.asked)-1] += " by force"
	}
	return d.regErr
}

func (d *daemon) Alive(ctx context.Context) error    { return errors.Join(d.aliveErr, ctx.Err()) }
func (d *daemon) Live(context.Context, string) error { return d.liveErr }

// at returns a time in seconds after a fixed one.
func at(seconds float64) time.Time {
	return time.Date(2026, 11, 21, 3, 0, 0, 0, time.UTC).Add(time.Duration(seconds * float64(time.Second)))
}

func registeredDriver(name string) status.Driver {
	return status.Driver{
		Name: name, Socket: safetext.Claim("/run/" + name + "/csi.sock"), Endpoint: safetext.Claim("/run/" + name + "/csi.sock"),
		State: "registered", Driver: status.Ready, Registration: status.Registered, Since: at(10.5),
		Took: 500 * time.Millisecond, RegisteredAt: at(10.5), LastGetInfoAt: at(10.25), Accepted: 1,
	}
}

func absentDriver(name string) status.Driver {
	return status.Driver{
		Name: name, Socket: safetext.Claim("/run/" + name + "/csi.sock"), Endpoint: safetext.Claim("/run/" + name + "/csi.sock"),
		State: "absent", Driver: status.Absent, Registration: status.None, Since: at(1), Reason: "nothing is at its socket",
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// served serves the control socket until stop or the end of the test. Serve must return nil.
func served(t *testing.T, b Backend) (path string, stop func()) {
	t.Helper()
	path = filepath.Join(fake.ShortDir(t), "control.sock")
	ln, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return path, serving(t, ln, func(ctx context.Context, ln net.Listener) error { return Serve(ctx, ln, b, discard()) })
}

func serving(t *testing.T, ln net.Listener, serve func(context.Context, net.Listener) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, ln) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}
