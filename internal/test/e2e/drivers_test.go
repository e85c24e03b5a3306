package e2e

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

// restart restarts a driver with another behaviour, after SIGKILL or SIGTERM.
func restart(c *harness.Daemon, d *harness.Driver, kill bool, change func(*fake.Answers)) {
	if kill {
		d.Kill()
	} else {
		d.Stop()
	}
	c.WaitStatus(d.Name, "driver absent", soon, func(s harness.DriverStatus) bool { return s.Driver == "absent" })
	if change != nil {
		d.Set(change)
	}
	d.Start()
}

func TestDriverRestartsUnchanged(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	unchanged(t, n, k, []string{d.Name}, func() {
		for i := range 5 {
			restart(c, d, i%2 == 0, nil)
			c.WaitStatus(d.Name, "driver ready", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" })
		}
	})
	if s := c.Driver(d.Name); s.State != "registered" || s.Republications != 0 {
		t.Errorf("status has %+v", s)
	}
}

// The socket may be a symbolic link that is moved between two instances of the driver: calls
// through it never fail, and the kubelet does not notice.
func TestLinkMovedBetweenInstances(t *testing.T) {
	t.Parallel()
	const name = "a.example"
	n := harness.New(t)
	for _, instance := range []string{"/a.sock", "/b.sock"} {
		n.DriverAt(name, n.Run+instance).Start()
	}
	link := n.Run + "/csi.sock"
	move := func(to string) {
		t.Helper()
		if err := errors.Join(os.Symlink(to, link+".next"), os.Rename(link+".next", link)); err != nil {
			t.Fatal(err)
		}
	}
	move("a.sock")
	n.Configure(name, link)
	k := n.StartKubelet()
	c := n.StartDaemon()
	k.Registered(0, name, soon)
	c.WaitState(name, "registered", soon)
	unchanged(t, n, k, []string{name}, func() {
		for i := range 50 {
			move([]string{"b.sock", "a.sock"}[i%2])
			if conn, err := net.Dial("unix", link); err != nil {
				t.Error(err)
			} else {
				conn.Close()
			}
		}
		c.WaitStatus(name, "driver ready", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" })
	})
	if s := c.Driver(name); s.State != "registered" || s.Republications != 0 {
		t.Errorf("status has %+v", s)
	}
}

func TestDriverProcessKilledAndHanging(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	p := n.StartDriverProcess("a.example")
	n.Configure(p.Name, p.Socket)
	k := n.StartKubelet()
	c := n.StartDaemon()
	k.Registered(0, p.Name, soon)
	c.WaitState(p.Name, "registered", soon)
	unchanged(t, n, k, []string{p.Name}, func() {
		p.Hang()
		harness.Never(t, 2*time.Second, "a hanging driver costs its registration", func() string {
			if s := c.Driver(p.Name); s.Registration != "registered" {
				return s.Registration
			}
			return ""
		})
		p.Resume()
		p.Kill()
		c.WaitStatus(p.Name, "driver absent", soon, func(s harness.DriverStatus) bool { return s.Driver == "absent" })
		p = n.StartDriverProcess("a.example")
		c.WaitStatus(p.Name, "driver ready", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" })
	})
}

// The kubelet learns each change of the driver's answers, with one republication each.
func TestDriverRestartsChanged(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		change func(*fake.Answers)
		right  func(harness.CSINodeDriver) bool
	}{
		"node id": {
			func(b *fake.Answers) { b.NodeID = "another" },
			func(d harness.CSINodeDriver) bool { return d.NodeID == "another" },
		},
		"limit": {
			func(b *fake.Answers) { b.MaxVolumes = 9 },
			func(d harness.CSINodeDriver) bool { return d.MaxVolumes == 9 },
		},
		"topology key": {
			func(b *fake.Answers) { b.Topology["example/rack"] = "7" },
			func(d harness.CSINodeDriver) bool { return len(d.TopologyKeys) == 2 },
		},
	}
	for what, tc := range cases {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.AddDriver("a.example")
			d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "1"} })
			d.Start()
			k := n.StartKubelet()
			c := n.StartDaemon()
			k.Registered(0, d.Name, soon)
			c.WaitState(d.Name, "registered", soon)
			mark := k.Mark()
			csiNode, _ := k.Writes()
			restart(c, d, true, tc.change)
			k.Deregistered(mark, d.Name, soon)
			k.Registered(mark, d.Name, soon)
			if got := k.CSINode()[d.Name]; !tc.right(got) {
				t.Errorf("CSINode has %+v", got)
			}
			c.WaitStatus(d.Name, "one republication", soon, func(s harness.DriverStatus) bool {
				return s.State == "registered" && s.Republications == 1
			})
			k.Quiet(k.Mark(), 2500*time.Millisecond)
			if csiNode2, _ := k.Writes(); csiNode2-csiNode != 2 {
				t.Errorf("%d writes of CSINode for one change, want 2", csiNode2-csiNode)
			}
			contains(t, "the log", c.Log(), "republishing")
		})
	}
}

// The kubelet would refuse a changed topology value while the Node has the old label: the working
// registration is left alone, and the reason says what to do.
func TestDriverRestartsWithAnotherTopologyValue(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "1"} })
	d.Start()
	k := n.StartKubelet()
	c := n.StartDaemon()
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
	unchanged(t, n, k, []string{d.Name}, func() {
		restart(c, d, false, func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "2"} })
		s := c.WaitStatus(d.Name, "a reason", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" && s.Reason != "" })
		contains(t, "the reason", s.Reason, "example/zone", "label")
		if s.State != "registered" {
			t.Errorf("state %q, want registered", s.State)
		}
	})
	// The kubelet would refuse the driver, so nothing is done without --force.
	mark := k.Mark()
	_, errs, code := n.RunCommand("reregister", d.Name, "--config-root", n.Etc)
	if code != 1 {
		t.Fatalf("reregister: %d %s", code, errs)
	}
	contains(t, "the refusal", errs, "example/zone", "label", "--force")
	// As the reason says: remove the label, then reregister with --force, because the daemon cannot
	// see the label.
	k.Command("label example/zone=")
	if out, errs, code := n.RunCommand("reregister", "--force", d.Name, "--config-root", n.Etc); code != 0 {
		t.Fatalf("reregister --force: %d %s%s", code, out, errs)
	}
	k.Registered(mark, d.Name, soon)
	c.WaitStatus(d.Name, "no reason left", soon, func(s harness.DriverStatus) bool { return s.State == "registered" && s.Reason == "" })
}

// The volume limit of a driver depends on the attached volumes, as with aws-ebs, and changes at
// each of 20 restarts: with "leave" nothing is written, and the status has both numbers.
func TestLimitThatChangesWithEachRestart(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("ebs.example", `when_limit_changes = "leave"`)
	d.Set(func(b *fake.Answers) { b.MaxVolumes = 39 })
	d.Start()
	k := n.StartKubelet()
	c := n.StartDaemon()
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
	const restarts = 20
	unchanged(t, n, k, []string{d.Name}, func() {
		for i := range restarts {
			limit := int64(38 - i)
			restart(c, d, i%2 == 0, func(b *fake.Answers) { b.MaxVolumes = limit })
			c.WaitStatus(d.Name, "the limit that the driver reports", soon, func(s harness.DriverStatus) bool {
				return s.Driver == "ready" && s.MaxVolumes == limit
			})
		}
	})
	out, errs, code := n.RunCommand("status", d.Name, "--config-root", n.Etc)
	if code != 0 {
		t.Errorf("status: %d %s", code, errs)
	}
	contains(t, "the status", out, "39", "19")
}

func TestAnotherDriverUnderTheName(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	mark := k.Mark()
	restart(c, d, false, func(b *fake.Answers) { b.Name = "other.example" })
	k.Deregistered(mark, d.Name, soon)
	s := c.WaitState(d.Name, "mismatch", soon)
	contains(t, "the reason", s.Reason, "other.example", "a.example")
	if got := n.Sockets(); len(got) != 0 {
		t.Errorf("plugins_registry has %q", got)
	}
	if got := k.CSINode(); len(got) != 0 {
		t.Errorf("CSINode has %v", got)
	}
	mark = k.Mark()
	d.Stop()
	d.Set(func(b *fake.Answers) { b.Name = d.Name })
	d.Start()
	k.Registered(mark, d.Name, soon)
}

func TestDriverGone(t *testing.T) {
	t.Parallel()
	t.Run("keep", func(t *testing.T) {
		t.Parallel()
		n, d, c, k := registered(t, "a.example")
		unchanged(t, n, k, []string{d.Name}, func() {
			d.Stop()
			s := c.WaitStatus(d.Name, "driver absent", soon, func(s harness.DriverStatus) bool { return s.Driver == "absent" })
			if s.State != "registered" || s.Reason == "" {
				t.Errorf("status has %+v", s)
			}
		})
	})
	t.Run("withdraw", func(t *testing.T) {
		t.Parallel()
		n, d, c, k := registered(t, "a.example", `when_driver_is_gone = "withdraw"`, `withdraw_after = "3s"`)
		unchanged(t, n, k, []string{d.Name}, func() { // back before withdraw_after: nothing happens
			restart(c, d, false, nil)
			c.WaitStatus(d.Name, "driver ready", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" })
		})
		mark := k.Mark()
		gone := time.Now()
		d.Stop()
		if e := k.Deregistered(mark, d.Name, soon); e.Time.Sub(gone) < 2900*time.Millisecond {
			t.Errorf("withdrawn after %v, want 3s", e.Time.Sub(gone))
		}
		c.WaitState(d.Name, "absent", soon)
		d.Start()
		k.Registered(mark, d.Name, soon)
	})
}

// The daemon removes its sockets at its end if nobody keeps them, whichever signal ends it, and the
// control socket, too.
func TestSignalsTakeTheSocketsAway(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			n, d, c, k := registered(t, "a.example")
			mark := k.Mark()
			c.Signal(sig)
			if code := c.Wait(10 * time.Second); code != 0 {
				t.Errorf("ended with %d", code)
			}
			if got := n.Sockets(); len(got) != 0 {
				t.Errorf("plugins_registry has %q", got)
			}
			k.Deregistered(mark, d.Name, soon)
			if _, _, code := n.RunCommand("status", "--config-root", n.Etc); code != 3 {
				t.Errorf("status exits with %d without a daemon, want 3", code)
			}
		})
	}
	t.Run("HUP reloads", func(t *testing.T) {
		t.Parallel()
		n, d, c, k := registered(t, "a.example")
		unchanged(t, n, k, []string{d.Name}, func() {
			n.Configure("late.example", n.Run+"/late.sock")
			c.Signal(syscall.SIGHUP)
			c.WaitState("late.example", "absent", soon)
		})
	})
}
