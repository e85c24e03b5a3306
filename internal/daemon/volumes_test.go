package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/status"
)

// serve starts the driver of n.table(name).
func (n *node) serve(name string) *fake.Driver {
	n.t.Helper()
	d := fake.NewDriver(filepath.Join(n.kubelet, name+".sock"), fake.Healthy(name))
	if _, err := d.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			n.t.Error(err)
		}
	})
	return d
}

// publish makes the kubelet's files of a volume of the driver that is published to a pod.
func (n *node) publish(name string) (unpublish func()) {
	n.t.Helper()
	pod := filepath.Join(n.kubelet, "pods", "pod-of-"+name)
	dir := filepath.Join(pod, "volumes/kubernetes.io~csi/pv")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vol_data.json"), fmt.Appendf(nil, `{"driverName":%q,"volumeHandle":"v"}`, name), 0o644); err != nil {
		n.t.Fatal(err)
	}
	return func() {
		if err := os.RemoveAll(pod); err != nil {
			n.t.Fatal(err)
		}
	}
}

func (n *node) remove(name string) {
	n.t.Helper()
	if err := os.Remove(n.path(name)); err != nil {
		n.t.Fatal(err)
	}
}

// The withdrawal after a table disappeared waits for the volumes of a driver that answers. A
// withdrawal that a user requested does not wait, and warns.
func TestWithdrawalWaitsForVolumes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	names := []string{"used.example", "dead.example", "unused.example", "disabled.example", "reload.example"}
	for _, name := range names {
		n.write("conf.d/50-"+name+".toml", n.table(name))
	}
	for _, name := range names {
		if name != "dead.example" {
			n.serve(name)
		}
	}
	c, stop := n.run()
	var unpublish func()
	for _, name := range names {
		n.await(c, name, has(name))
		if name == "dead.example" {
			n.publish(name)
			continue
		}
		n.await(c, name+" to be published", func(s status.Document) bool {
			d, _ := s.Driver(name)
			return d.Registration == status.Published
		})
		if name != "unused.example" {
			if u := n.publish(name); name == "used.example" {
				unpublish = u
			}
		}
	}
	n.write("conf.d/60-disabled.toml", "[driver.\"disabled.example\"]\nenabled = false\n")
	n.await(c, "disabled.example to be withdrawn", func(s status.Document) bool {
		d, _ := s.Driver("disabled.example")
		return d.State == status.Disabled
	})
	for _, name := range names[:3] {
		n.remove("conf.d/50-" + name + ".toml")
	}
	n.await(c, "the end of the grace period", func(s status.Document) bool {
		d, there := s.Driver("used.example")
		return there && strings.Contains(d.Reason, "withdrawn when its volumes are no longer in use (1 published, 0 staged), or by csi-registrar reload") &&
			d.Registration == status.Published && !has("unused.example")(s) && !has("dead.example")(s)
	})
	unpublish()
	n.await(c, "used.example to be withdrawn", func(s status.Document) bool { return !has("used.example")(s) })
	n.remove("conf.d/50-reload.example.toml")
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.await(c, "reload.example to be withdrawn", func(s status.Document) bool { return !has("reload.example")(s) })
	stop()
	for _, name := range names {
		warned := false
		for line := range strings.Lines(n.log.String()) {
			warned = warned || strings.Contains(line, "withdrawing a driver whose volumes are in use") &&
				strings.Contains(line, "driver="+name+" published=1 staged=0")
		}
		if want := name == "disabled.example" || name == "reload.example"; warned != want {
			t.Errorf("a warning about %s: %t, want %t\n%s", name, warned, want, n.log.String())
		}
	}
}
