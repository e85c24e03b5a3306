// Package oldkubelet tests csi-registrar with the newest kubelet that does not retry a plugin that
// it has refused (go.mod says which that is, and why).
package oldkubelet

import (
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

func TestMain(m *testing.M) { harness.Main(m) }

const soon = 20 * time.Second

// refused makes the kubelet refuse a driver once, and then removes the cause.
func refused(t *testing.T) (*harness.Node, *harness.Driver, *harness.Daemon, *harness.Kubelet) {
	t.Helper()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "1"} })
	d.Start()
	k := n.StartKubelet()
	k.Command("label example/zone=2")
	c := n.StartDaemon()
	k.Refused(0, d.Name, soon)
	c.WaitState(d.Name, "refused", soon)
	k.Command("label example/zone=")
	return n, d, c, k
}

// This kubelet keeps a plugin that it has refused, and does not retry until the socket is recreated
// after 150 s. That happens once, and then nothing more.
func TestRefusedOnceIsRecreated(t *testing.T) {
	t.Parallel()
	n, d, c, k := refused(t)
	mark, at := k.Mark(), time.Now()
	ino := n.Inode(n.RegSocket(d.Name))
	k.Quiet(mark, 130*time.Second) // kubelet 1.36 would have retried several times by now
	if n.Inode(n.RegSocket(d.Name)) != ino {
		t.Error("the socket was recreated before its time")
	}
	e := k.Registered(mark, d.Name, 40*time.Second)
	t.Logf("registered %v after the refusal", e.Time.Sub(at))
	s := c.WaitState(d.Name, "registered", soon)
	if s.Republications != 1 {
		t.Errorf("%d republications, want 1", s.Republications)
	}
	k.Quiet(k.Mark(), 2500*time.Millisecond)
}

// The refusal itself is lost: the daemon is killed while the kubelet calls the driver, and runs
// again only after the kubelet has given up its notification (5 s). The kubelet keeps the plugin
// and does not retry, and the next daemon knows only that it called GetInfo.
func TestRefusalIsLost(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "1"} })
	d.Start()
	m := n.Manager()
	c := m.StartDaemon()
	c.WaitState(d.Name, "published", soon)
	d.Set(func(b *fake.Answers) { b.Hang = map[string]bool{fake.NodeGetInfo: true} })
	asked := d.Calls(fake.NodeGetInfo)
	k := n.StartKubelet()
	k.Command("label example/zone=2")
	harness.Eventually(t, soon, "the kubelet asks the driver", func() string {
		if d.Calls(fake.NodeGetInfo) == asked {
			return "not yet"
		}
		return ""
	})
	c.WaitStatus(d.Name, "the kubelet's GetInfo", soon, func(s harness.DriverStatus) bool { return !s.LastGetInfoAt.IsZero() })
	at := time.Now()
	c.Kill()
	d.Set(func(b *fake.Answers) { b.Hang = nil })
	k.Refused(0, d.Name, soon)
	// Longer than the kubelet retries the call; no event reports that it gives up.
	time.Sleep(7 * time.Second)
	k.Command("label example/zone=")
	mark := k.Mark()
	ino := n.Inode(n.RegSocket(d.Name))
	c = m.StartDaemon()
	c.WaitStatus(d.Name, "that the kubelet has not confirmed", soon, func(s harness.DriverStatus) bool {
		return s.State == "published" && strings.Contains(s.Reason, "has asked, and has not confirmed")
	})
	k.Quiet(mark, 130*time.Second-time.Since(at))
	if n.Inode(n.RegSocket(d.Name)) != ino {
		t.Error("the socket was recreated before its time")
	}
	e := k.Registered(mark, d.Name, 60*time.Second)
	t.Logf("registered %v after the kubelet had asked", e.Time.Sub(at))
	if s := c.WaitState(d.Name, "registered", soon); s.Republications != 1 {
		t.Errorf("%d republications, want 1", s.Republications)
	}
	k.Quiet(k.Mark(), 2500*time.Millisecond)
}

// Nobody has to wait for 150 s: a request of the user or a change of the driver causes another try.
func TestRefusedAndTriedAgainForAReason(t *testing.T) {
	t.Parallel()
	t.Run("reregister", func(t *testing.T) {
		t.Parallel()
		n, d, c, k := refused(t)
		mark := k.Mark()
		if out, errs, code := n.RunCommand("reregister", d.Name, "--config-root", n.Etc); code != 0 {
			t.Fatalf("reregister: %d %s%s", code, out, errs)
		}
		k.Registered(mark, d.Name, soon)
		c.WaitState(d.Name, "registered", soon)
	})
	t.Run("the driver returns", func(t *testing.T) {
		t.Parallel()
		_, d, c, k := refused(t)
		mark := k.Mark()
		d.Stop()
		c.WaitStatus(d.Name, "driver absent", soon, func(s harness.DriverStatus) bool { return s.Driver == "absent" })
		d.Start()
		k.Registered(mark, d.Name, soon)
		c.WaitState(d.Name, "registered", soon)
	})
	t.Run("its configuration changes", func(t *testing.T) {
		t.Parallel()
		n, d, c, k := refused(t)
		mark := k.Mark()
		n.Configure(d.Name, d.Socket, `timeout = "4s"`)
		k.Registered(mark, d.Name, soon)
		c.WaitState(d.Name, "registered", soon)
	})
}
