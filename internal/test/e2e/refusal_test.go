package e2e

import (
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

// collide makes the kubelet refuse a driver, because its topology value differs from the Node's
// label.
func collide(t *testing.T) (*harness.Node, *harness.Driver, *harness.Daemon, *harness.Kubelet) {
	t.Helper()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "1"} })
	d.Start()
	k := n.StartKubelet()
	k.Command("label example/zone=2")
	c := n.StartDaemon()
	k.Refused(0, d.Name, soon)
	return n, d, c, k
}

// The socket stays for the kubelet's own retries, the status has the reason, and after the cause is
// fixed the kubelet's next try succeeds.
func TestRefusalIsKeptAndRetriedByTheKubelet(t *testing.T) {
	t.Parallel()
	n, d, c, k := collide(t)
	s := c.WaitState(d.Name, "refused", soon)
	contains(t, "kubelet_error", s.KubeletError, "example/zone")
	contains(t, "the reason", s.Reason, "example/zone")
	ino := n.Inode(n.RegSocket(d.Name))
	mark := k.Mark()
	k.Refused(mark, d.Name, soon) // by itself
	k.Command("label example/zone=")
	k.Registered(mark, d.Name, soon)
	s = c.WaitState(d.Name, "registered", soon)
	if s.KubeletError != "" || s.Reason != "" || s.Republications != 0 {
		t.Errorf("status has %+v", s)
	}
	if n.Inode(n.RegSocket(d.Name)) != ino {
		t.Error("the socket was recreated although the kubelet retries")
	}
}

// The API server is down when the kubelet registers the driver.
func TestRefusalByAnAPIServerThatIsDown(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	k := n.StartKubelet()
	k.Command("csinode")
	c := n.StartDaemon()
	k.Command("api down")
	d.Start()
	k.Refused(0, d.Name, soon)
	s := c.WaitState(d.Name, "refused", soon)
	contains(t, "kubelet_error", s.KubeletError, "API server is down")
	k.Command("api up")
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
}

// The daemon does not loop: while the kubelet keeps refusing and the driver restarts unchanged, the
// registration socket is recreated at most once per cause.
func TestRefusalMakesNoLoop(t *testing.T) {
	t.Parallel()
	n, d, c, k := collide(t)
	c.WaitState(d.Name, "refused", soon)
	csiNode, _ := k.Writes()
	const restarts = 3
	for range restarts {
		restart(c, d, true, nil)
		c.WaitStatus(d.Name, "driver ready", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" })
	}
	var before int
	harness.Eventually(t, soon, "the kubelet's answer to the last one", func() string {
		s := c.Driver(d.Name)
		before = s.Republications
		if s.State != "refused" {
			return s.State
		}
		return ""
	})
	if before > restarts {
		t.Errorf("%d republications for %d returns of the driver", before, restarts)
	}
	harness.Never(t, span(10*time.Second, 140*time.Second), "a republication without a cause", func() string {
		if s := c.Driver(d.Name); s.Republications > before {
			return s.Reason
		}
		return ""
	})
	if csiNode2, _ := k.Writes(); csiNode2 != csiNode {
		t.Errorf("%d writes of CSINode", csiNode2-csiNode)
	}
	if _, _, code := n.RunCommand("status", "--config-root", n.Etc); code != 1 {
		t.Errorf("status exits with %d, want 1", code)
	}
}

// A kubelet that restarts with other labels registers a driver that the kubelet before refused.
func TestRefusalAndAnotherKubelet(t *testing.T) {
	t.Parallel()
	n, d, c, k := collide(t)
	c.WaitState(d.Name, "refused", soon)
	k.Command("label example/zone=")
	k.Kill()
	k = n.StartKubelet()
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
}
