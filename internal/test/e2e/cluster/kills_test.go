package cluster

import (
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

const (
	killLimit = 2 * time.Minute
	// quietTime is longer than the time from a change in plugins_registry to a write of the
	// kubelet.
	quietTime = 3 * time.Second
)

// TestKubeletIsStoppedAtEveryPointOfARegistration stops the real kubelet while it registers a
// driver, and starts it again. The driver must be registered afterwards, on the same socket as
// before; other writes of the CSINode are due to the kubelet alone. KUBELET names another version,
// see scripts/kubelet.
func TestKubeletIsStoppedAtEveryPointOfARegistration(t *testing.T) {
	c := start(t)
	c.killKubelet()
	g := newGate(t, c.ControlPlane)
	c.api = strings.TrimPrefix(g.server.URL, "https://")
	c.startKubelet()
	daemon := c.n.StartDaemon()
	writes := c.countCSINodeWrites()

	points := []struct {
		name string
		// reach returns when the kubelet has reached the point.
		reach func(p *play)
	}{
		{"socket published, not asked", func(p *play) {
			c.kubelet.Signal(syscall.SIGSTOP)
			p.publish()
		}},
		{"in GetInfo", func(p *play) {
			c.kubelet.Signal(syscall.SIGSTOP)
			p.publish()
			daemon.Signal(syscall.SIGSTOP)
			c.kubelet.Signal(syscall.SIGCONT)
			p.asked()
		}},
		{"in NodeGetInfo", func(p *play) {
			c.kubelet.Signal(syscall.SIGSTOP)
			p.publish()
			p.d.Set(func(a *fake.Answers) { a.Hang = map[string]bool{fake.NodeGetInfo: true} })
			before := p.d.Calls(fake.NodeGetInfo)
			c.kubelet.Signal(syscall.SIGCONT)
			harness.Eventually(t, killLimit, "the kubelet asks the driver", func() string {
				if p.d.Calls(fake.NodeGetInfo) == before {
					return "not yet"
				}
				return ""
			})
		}},
		{"before the write of the Node", func(p *play) { p.hold(g, "nodes", false) }},
		{"after the write of the Node", func(p *play) { p.hold(g, "nodes", true) }},
		{"before the write of the CSINode", func(p *play) { p.hold(g, "csinodes", false) }},
		{"after the write of the CSINode", func(p *play) { p.hold(g, "csinodes", true) }},
		{"in NotifyRegistrationStatus", func(p *play) {
			// The daemon cannot answer. It is unknown whether the kubelet has sent the call when it
			// is stopped, but it has not received the answer.
			h := p.hold(g, "csinodes", true)
			daemon.Signal(syscall.SIGSTOP)
			close(h.release)
		}},
		{"registered", func(p *play) {
			p.publish()
			daemon.WaitState(p.d.Name, "registered", killLimit)
		}},
	}
	for i, point := range points {
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			p := &play{c: c, daemon: daemon, d: c.n.AddDriver(fmt.Sprintf("p%d-%d.example", i, sig))}
			daemon.WaitState(p.d.Name, "absent", killLimit)
			before := writes.count()
			point.reach(p)
			socket := c.n.Inode(c.n.RegSocket(p.d.Name))
			c.kubelet.Signal(sig)
			c.kubelet.Signal(syscall.SIGCONT) // a stopped process does not handle SIGTERM
			c.stopKubelet(sig)
			daemon.Signal(syscall.SIGCONT)
			p.d.Set(func(a *fake.Answers) { a.Hang = nil })
			stopped := writes.count()
			began := time.Now()
			c.startKubelet()
			s := daemon.WaitStatus(p.d.Name, "registered with the new kubelet", killLimit, func(s harness.DriverStatus) bool {
				return s.State == "registered" && s.RegisteredAt.After(began)
			})
			harness.Never(t, quietTime, "the driver is missing", func() string {
				for _, d := range c.csiNode().Spec.Drivers {
					if d.Name == p.d.Name && d.NodeID == "id-of-"+p.d.Name {
						return ""
					}
				}
				return "it is"
			})
			for _, d := range daemon.Status().Drivers {
				if d.State != "registered" || d.Republications != 0 {
					t.Errorf("%s, %v: %s is %s, %d republications", point.name, sig, d.Name, d.State, d.Republications)
				}
			}
			if now := c.n.Inode(c.n.RegSocket(p.d.Name)); now != socket {
				t.Errorf("%s, %v: the socket is another one", point.name, sig)
			}
			t.Logf("| %s | %s | %d | %d | %.1f s |", point.name, sig, stopped-before, writes.count()-stopped, s.RegisteredAt.Sub(began).Seconds())
		}
	}
}

// play interrupts one registration.
type play struct {
	c      *cluster
	daemon *harness.Daemon
	d      *harness.Driver
}

// publish starts the driver and waits for its registration socket.
func (p *play) publish() {
	p.c.t.Helper()
	p.d.Start()
	p.daemon.WaitStatus(p.d.Name, "a registration socket", killLimit, func(s harness.DriverStatus) bool {
		return s.State == "published" || s.State == "registered"
	})
}

// asked waits until the kubelet has called the driver.
func (p *play) asked() {
	p.c.t.Helper()
	begun := regexp.MustCompile(`RegisterPlugin started.*` + regexp.QuoteMeta(p.d.Name))
	harness.Eventually(p.c.t, killLimit, "the kubelet begins", func() string {
		if begun.MatchString(p.c.kubelet.Log()) {
			return ""
		}
		return "not yet"
	})
}

// hold publishes the driver and waits until a write for it is held.
func (p *play) hold(g *gate, resource string, answered bool) *hold {
	p.c.t.Helper()
	h := g.hold(resource, p.d.Name, answered)
	p.d.Start()
	select {
	case <-h.reached:
	case <-time.After(killLimit):
		p.c.t.Fatalf("the kubelet has not written %s of %s", resource, p.d.Name)
	}
	return h
}
