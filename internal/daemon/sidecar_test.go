package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"csi-registrar/internal/core/sidecar"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// startSidecar runs the daemon with node-driver-registrar's flags for a driver that runs, and
// does not answer some methods.
func startSidecar(t *testing.T, hang ...string) (d *fake.Driver, await func(state string)) {
	t.Helper()
	n := newNode(t)
	d = fake.NewDriver(filepath.Join(n.kubelet, "d.sock"), fake.Healthy("a.example"))
	d.Set(func(a *fake.Answers) {
		a.Hang = map[string]bool{}
		for _, method := range hang {
			a.Hang[method] = true
		}
	})
	registry := filepath.Join(n.kubelet, "registry")
	if _, err := d.Start(); errors.Join(err, os.Mkdir(registry, 0o755)) != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	c, stop := n.start(func(ctx context.Context, o Options) error {
		return RunSidecar(ctx, o, sidecar.Options{
			Socket: d.Socket, Endpoint: "/of/the/host.sock", RegistryDir: registry, Timeout: 5 * time.Second,
		})
	})
	t.Cleanup(stop)
	return d, func(state string) {
		t.Helper()
		n.await(c, state, func(s status.Document) bool { return len(s.Drivers) == 1 && s.Drivers[0].State == state })
	}
}

// The start takes as long as one round of calls, not two.
func TestSidecarAsksOnce(t *testing.T) {
	t.Parallel()
	d, await := startSidecar(t)
	await("published")
	for _, method := range []string{fake.GetPluginInfo, fake.NodeGetInfo} {
		if n := d.Calls(method); n != 1 {
			t.Errorf("%d calls of %s", n, method)
		}
	}
}

// The name that the driver reported first stays. This also shows that the watcher runs.
func TestSidecarKeepsTheName(t *testing.T) {
	t.Parallel()
	d, await := startSidecar(t)
	await("published")
	for _, next := range []struct{ name, state string }{{"b.example", "mismatch"}, {"a.example", "published"}} {
		if err := d.Stop(); err != nil {
			t.Fatal(err)
		}
		d.Set(func(a *fake.Answers) { a.Name = next.name })
		if _, err := d.Start(); err != nil {
			t.Fatal(err)
		}
		await(next.state)
	}
}

// A driver that hangs in its first call does not hide its successor: NodeGetInfo has two minutes.
func TestSidecarOfADriverThatHangs(t *testing.T) {
	t.Parallel()
	d, await := startSidecar(t, fake.NodeGetInfo)
	await("starting")
	next := fake.NewDriver(d.Socket, fake.Healthy("a.example"))
	if err := os.Remove(d.Socket); err != nil {
		t.Fatal(err)
	}
	if _, err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(next.Kill)
	await("published")
}
