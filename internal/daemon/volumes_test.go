package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
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

// The withdrawal after a table disappeared waits for the volumes. A disabled driver is
// withdrawn at once, with a warning.
func TestWithdrawalWaitsForVolumes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.period = time.Second
	names := []string{"used.example", "down.example", "unused.example", "disabled.example"}
	for _, name := range names {
		n.write("conf.d/50-"+name+".toml", n.table(name))
	}
	for _, name := range names {
		if name != "down.example" {
			n.serve(name)
		}
	}
	c, stop := n.run()
	unpublish := map[string]func(){}
	for _, name := range names {
		n.await(c, name, has(name))
		if name != "down.example" {
			n.await(c, name+" to be published", published(name))
		}
		if name != "unused.example" {
			unpublish[name] = n.publish(name)
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
		return kept("used.example")(s) && published("used.example")(s) && kept("down.example")(s) && !has("unused.example")(s)
	})
	for _, name := range names[:2] {
		unpublish[name]()
		n.await(c, name+" to be withdrawn", func(s status.Document) bool { return !has(name)(s) })
	}
	stop()
	for _, name := range names {
		if want, warned := name == "disabled.example", n.warned(name); warned != want {
			t.Errorf("a warning about %s: %t, want %t\n%s", name, warned, want, n.log.String())
		}
	}
}

// A driver whose table was renamed stays registered while its volumes are in use: the new table is
// an error, and takes effect when they are unmounted, or by force.
func TestRenameWaitsForVolumes(t *testing.T) {
	t.Parallel()
	for name, force := range map[string]bool{"unmounted": false, "by force": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.period = time.Second
			n.write("conf.d/50-a.toml", n.table("a.example"))
			n.serve("a.example")
			c, _ := n.run()
			n.await(c, "a.example to be published", published("a.example"))
			unpublish := n.publish("a.example")
			renamed := strings.Replace(n.table("a.example"), "a.example", "b.example", 1)
			n.write("conf.d/50-a.toml", renamed)
			stays := func(s status.Document) bool {
				d, _ := s.Driver("b.example")
				return published("a.example")(s) && d.State == status.Invalid
			}
			n.await(c, "the error", stays)
			_, err := c.Reload(t.Context(), false)
			if failed, ok := errors.AsType[*control.Error](err); !ok || failed.Text != n.path("conf.d/50-a.toml")+`:2: driver."b.example".socket: replaces that of a.example, which stays registered: `+
				`1 volume in use, no table: it is withdrawn when they are unmounted, or by csi-registrar reload --force (write [driver."a.example"] until then)` {
				t.Errorf("reload: %v", err)
			}
			if s, err := c.Status(t.Context()); err != nil || !stays(s) {
				t.Errorf("after a reload: %+v, %v", s.Drivers, err)
			}
			if !force {
				unpublish()
			} else if notes, err := c.Reload(t.Context(), true); err != nil || len(notes) != 1 || !strings.Contains(notes[0], "a.example is withdrawn with 1 volume in use") {
				t.Errorf("by force: %q, %v", notes, err)
			}
			n.await(c, "the new table", func(s status.Document) bool {
				d, _ := s.Driver("b.example")
				return !has("a.example")(s) && d.Driver == status.Mismatch
			})
		})
	}
}

func published(name string) func(status.Document) bool {
	return func(s status.Document) bool {
		d, _ := s.Driver(name)
		return d.Registration == status.Published
	}
}

// kept: the driver has no table, and a volume in use.
func kept(name string) func(status.Document) bool {
	return func(s status.Document) bool {
		d, _ := s.Driver(name)
		return d.NoTable && strings.Contains(d.Reason, "1 volume in use, no table: it is withdrawn when they are unmounted, or by csi-registrar reload --force")
	}
}

// warned reports whether the daemons, which are stopped, warned that the driver's volumes are in
// use.
func (n *node) warned(name string) bool {
	return strings.Contains(n.log.String(), `driver=`+name+` volumes="1 volume in use"`)
}

// A reload withdraws no driver whose volumes are in use or not known, unless by force.
func TestReloadKeepsDriversWithVolumes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, name := range []string{"a.example", "b.example", "c.example"} {
		n.write("conf.d/50-"+name+".toml", n.table(name))
		n.serve(name)
	}
	c, stop := n.run()
	for _, name := range []string{"a.example", "b.example", "c.example"} {
		n.await(c, name+" to be published", published(name))
	}
	n.publish("a.example")
	reload := func(force bool, notes ...string) status.Document {
		t.Helper()
		got, err := c.Reload(t.Context(), force)
		if err != nil || len(got) != len(notes) {
			t.Errorf("reload: %q (%v), want %q", got, err, notes)
		}
		for i := range min(len(got), len(notes)) {
			if !strings.Contains(got[i], notes[i]) {
				t.Errorf("reload: %q, want %q", got[i], notes[i])
			}
		}
		s, err := c.Status(t.Context())
		if err != nil {
			t.Error(err)
		}
		return s
	}
	if err := os.Rename(n.path("conf.d/50-a.example.toml"), n.path("conf.d/50-a.example.conf")); err != nil {
		t.Fatal(err)
	}
	n.remove("conf.d/50-b.example.toml")
	if s := reload(false, "a.example stays registered: 1 volume in use, no table"); !kept("a.example")(s) || !published("a.example")(s) || has("b.example")(s) {
		t.Errorf("after a reload: %+v", s.Drivers)
	}
	if err := os.Rename(n.path("conf.d/50-a.example.conf"), n.path("conf.d/50-a.example.toml")); err != nil {
		t.Fatal(err)
	}
	if s := reload(false); kept("a.example")(s) || !published("a.example")(s) {
		t.Errorf("with its table again: %+v", s.Drivers)
	}
	n.remove("conf.d/50-a.example.toml")
	if s := reload(true, "a.example is withdrawn with 1 volume in use: the kubelet cannot unmount"); has("a.example")(s) {
		t.Errorf("by force: %+v", s.Drivers)
	}
	n.publish("c.example")
	n.write("conf.d/60-c.toml", "[driver.\"c.example\"]\nenabled = false\n")
	reload(false, "c.example is withdrawn with 1 volume in use")
	n.remove("conf.d/60-c.toml")
	reload(false)

	if err := os.RemoveAll(filepath.Join(n.kubelet, "pods")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("pods", filepath.Join(n.kubelet, "pods")); err != nil { // a loop
		t.Fatal(err)
	}
	n.remove("conf.d/50-c.example.toml")
	if s := reload(false, "c.example stays registered: an unknown number of volumes in use (cannot read the volumes"); !has("c.example")(s) {
		t.Errorf("volumes that cannot be counted: %+v", s.Drivers)
	}
	stop()
	if !n.warned("a.example") || n.warned("b.example") || !n.warned("c.example") {
		t.Errorf("warnings:\n%s", n.log.String())
	}
}

// TestVolumesInUse checks that a volume that is staged and not published is in use, too, and that
// the number is unknown after a count that failed.
func TestVolumesInUse(t *testing.T) {
	v := &volumeCount{count: func() (map[string]status.Volumes, error) {
		return map[string]status.Volumes{"a": {Staged: 2, Published: 1}, "b": {Published: 1}}, nil
	}}
	for driver, want := range map[string]string{"a": "2 volumes in use", "b": "1 volume in use", "c": ""} {
		if got := v.inUse(driver); got != want {
			t.Errorf("%s: %q", driver, got)
		}
	}
	kubelet := t.TempDir()
	if err := os.Symlink("pods", filepath.Join(kubelet, "pods")); err != nil { // a loop
		t.Fatal(err)
	}
	var counts sync.WaitGroup
	d := &daemon{
		options: Options{KeepSockets: true}, log: slog.New(slog.DiscardHandler), pool: worker.NewPool(),
		live: newLiveness(t.Context(), counts.Go),
	}
	u := nodeVolumes{last: new(status.NodeVolumes)}
	s := status.Document{PluginsRegistry: safetext.Claim(filepath.Join(kubelet, "plugins_registry"))}
	u.look(d, s)
	if counts.Wait(); u.look(d, s) != nil {
		t.Error("an old number after a count that failed")
	}
}

// Many drivers are withdrawn by one reload without a false message.
func TestReloadWithdrawsManyDrivers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	const drivers, pods = 100, 250
	var tables strings.Builder
	for i := range drivers {
		tables.WriteString(n.table(fmt.Sprintf("d%d.example", i)))
		n.serve(fmt.Sprintf("d%d.example", i))
	}
	n.write("conf.d/50-many.toml", tables.String())
	for i := range pods {
		n.publish(fmt.Sprintf("other%d.example", i))
	}
	c, stop := n.run()
	for i := range drivers {
		n.await(c, "all drivers", published(fmt.Sprintf("d%d.example", i)))
	}
	n.remove("conf.d/50-many.toml")
	start := time.Now()
	notes, err := c.Reload(t.Context(), false)
	t.Logf("a reload without %d drivers takes %s", drivers, time.Since(start))
	if err != nil || len(notes) > 1 || len(notes) == 1 && !strings.Contains(notes[0], "withdrawals go on") {
		t.Errorf("%q (%v)", notes, err)
	}
	n.await(c, "no driver", func(s status.Document) bool { return len(s.Drivers) == 0 })
	stop()
	for line := range strings.Lines(n.log.String()) {
		// No kubelet runs here. The daemon reports that after 5 s: on a busy machine before the
		// reload.
		if strings.Contains(line, "the kubelet has not asked") {
			continue
		}
		if strings.Contains(line, "WARN") || strings.Contains(line, "level=ERROR") {
			t.Error(line)
		}
	}
}

// Volumes of drivers without a registration socket count, whoever's it would be.
func TestCountUnregistered(t *testing.T) {
	n := newNode(t)
	registry := filepath.Join(n.kubelet, "plugins_registry")
	s := status.Document{PluginsRegistry: safetext.Claim(registry), Drivers: []status.Driver{
		{Name: "ours.example", Registration: status.Registered}, {Name: "absent.example", Registration: status.None},
	}}
	count := func(want int) {
		t.Helper()
		if got, err := countVolumes(t.Context(), worker.NewPool(), s); got.Unregistered != want || err != nil {
			t.Errorf("%+v (%v), want %d", got, err, want)
		}
	}
	count(0)
	for _, name := range []string{"ours.example", "absent.example", "gone.example", "sidecar.example"} {
		n.publish(name)
	}
	count(3)
	if err := os.MkdirAll(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", filepath.Join(registry, "sidecar.example-reg.sock"))
	if err != nil {
		t.Fatal(err)
	}
	count(2)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	count(3)
	if err := os.RemoveAll(filepath.Join(n.kubelet, "pods")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("pods", filepath.Join(n.kubelet, "pods")); err != nil { // a loop
		t.Fatal(err)
	}
	if got, err := countVolumes(t.Context(), worker.NewPool(), s); err == nil {
		t.Errorf("%+v, although they cannot be read", got)
	}
}

// foreign is a registration socket that answers for one driver.
type foreign struct {
	registerapi.UnimplementedRegistrationServer
	driver string
}

func (r foreign) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: r.driver}, nil
}

// A registration socket that does not answer does not hide those after it.
func TestCountUnregisteredBehindASocketThatHangs(t *testing.T) {
	n := newNode(t)
	registry := filepath.Join(n.kubelet, "plugins_registry")
	if err := os.MkdirAll(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	n.publish("other.example")
	listen := func(name string) net.Listener {
		ln, err := net.Listen("unix", filepath.Join(registry, name))
		if err != nil {
			t.Fatal(err)
		}
		return ln
	}
	defer listen("a.sock").Close() // accepts nothing
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, foreign{driver: "other.example"})
	ln := listen("b.sock")
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ln) }()
	got, err := countVolumes(t.Context(), worker.NewPool(), status.Document{PluginsRegistry: safetext.Claim(registry)})
	if got.Unregistered != 0 || got.Waiting != 1 || err != nil {
		t.Errorf("%+v (%v), want 0", got, err)
	}
	server.Stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A driver that another registrar serves is dropped with its table: that one has the registration,
// and would have to share it at each of its restarts.
func TestDriverServedByAnotherDoesNotStay(t *testing.T) {
	v := &volumeCount{count: func() (map[string]status.Volumes, error) {
		return map[string]status.Volumes{"ours.example": {Published: 1}, "theirs.example": {Published: 1}}, nil
	}, status: func() status.Document {
		return status.Document{Drivers: []status.Driver{{Name: "ours.example"}, {Name: "theirs.example", ServedBy: status.ServedBy{PID: 7}}}}
	}}
	for driver, want := range map[string]bool{"ours.example": true, "theirs.example": false, "unused.example": false} {
		if why := v.mustStay(driver); (why != "") != want {
			t.Errorf("%s: %q", driver, why)
		}
	}
}
