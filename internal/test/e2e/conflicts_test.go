package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
)

// conflict checks that the daemon waits and names the other registrar.
func conflict(t *testing.T, c *harness.Daemon, driver, path string) {
	t.Helper()
	s := c.WaitState(driver, "conflict", soon)
	contains(t, "the reason", s.Reason, path)
}

// A driver is moved from its sidecar to the host: the daemon leaves the sidecar's socket alone
// while the sidecar runs, and takes over when it has ended.
func TestMovedFromTheSidecar(t *testing.T) {
	t.Parallel()
	leave := map[string]func(*harness.Sidecar){
		"stopped": (*harness.Sidecar).Stop,
		"killed":  (*harness.Sidecar).Kill,
	}
	for how, leaves := range leave {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.AddDriver("a.example")
			d.Start()
			k := n.StartKubelet()
			s := n.StartSidecar(d.Socket)
			k.Registered(0, d.Name, soon)
			var c *harness.Daemon
			began := time.Now()
			unchanged(t, n, k, []string{d.Name}, func() {
				c = n.StartDaemon()
				conflict(t, c, d.Name, n.RegSocket(d.Name))
			})
			mark := k.Mark()
			left := time.Now()
			leaves(s)
			e := k.Registered(mark, d.Name, soon)
			t.Logf("registered %v after the sidecar left", e.Time.Sub(left))
			limit := 4 * time.Second // ≤ 1 s to take over, then the kubelet's second, twice
			if how == "killed" {
				// It leaves its socket, and no event reports that nobody listens any more. The
				// pause before the next attempt doubles, so it is as long as the conflict has
				// lasted.
				limit += 2 * left.Sub(began)
			}
			if took := e.Time.Sub(left); took > limit {
				t.Errorf("registered only %v after the sidecar left, want %v", took, limit)
			}
			c.WaitState(d.Name, "registered", soon)
		})
	}
}

// And back: a sidecar replaces the socket at the path, as node-driver-registrar does. The daemon
// leaves it alone, and takes over again when the sidecar has ended.
func TestSidecarStealsThePath(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	mark := k.Mark()
	s := n.StartSidecar(d.Socket)
	theirs := n.Inode(n.RegSocket(d.Name))
	conflict(t, c, d.Name, n.RegSocket(d.Name))
	k.Registered(mark, d.Name, soon)
	if ino := n.Inode(n.RegSocket(d.Name)); ino != theirs {
		t.Error("the sidecar's socket was replaced")
	}
	mark = k.Mark()
	s.Stop()
	k.Deregistered(mark, d.Name, soon)
	k.Registered(mark, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
}

// The same name from another path (a sidecar with a patched name, a symlink): two registrations of
// one name would conflict in the kubelet.
func TestSameNameFromAnotherPath(t *testing.T) {
	t.Parallel()
	places := map[string]func(n *harness.Node) string{
		"beside":         func(n *harness.Node) string { return filepath.Join(n.Registry(), "old-name.sock") },
		"in a directory": func(n *harness.Node) string { return filepath.Join(n.Registry(), "vendor", "reg.sock") },
	}
	for where, place := range places {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.AddDriver("a.example")
			d.Start()
			k := n.StartKubelet()
			path := place(n)
			s := n.SidecarAt(path, d.Name, d.Socket)
			k.Registered(0, d.Name, soon)
			c := n.StartDaemon()
			conflict(t, c, d.Name, path)
			if _, err := os.Lstat(n.RegSocket(d.Name)); err == nil {
				t.Error("published beside it")
			}
			mark := k.Mark()
			s.Stop()
			k.Registered(mark, d.Name, soon)
			c.WaitState(d.Name, "registered", soon)
		})
	}
}

// A second registrar that comes later: the kubelet refuses it, because the driver is registered, so
// nothing is withdrawn. After a restart of the kubelet it may get the driver: doctor names it.
func TestSameNameFromAnotherPathLater(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	path := filepath.Join(n.Registry(), "old-name.sock")
	ino := n.Inode(n.RegSocket(d.Name))
	s := n.SidecarAt(path, d.Name, d.Socket)
	k.WaitAfter(0, "look at the second socket", soon, func(e harness.Event) bool { return e.Event == "validate" && e.Error != "" })
	// The daemon does not look for it, because the registration works; doctor does.
	out, errs, _ := n.RunCommand("doctor", d.Name, "--config-root", n.Etc)
	contains(t, "doctor", out+errs, path)
	s.Stop()
	if st := c.Driver(d.Name); st.State != "registered" || st.Republications != 0 || st.Reason != "" {
		t.Errorf("status has %+v", st)
	}
	if n.Inode(n.RegSocket(d.Name)) != ino {
		t.Error("the registration socket was recreated")
	}
	if _, ok := k.CSINode()[d.Name]; !ok {
		t.Error("the kubelet lost the driver")
	}
}

func TestTwoDaemons(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	two := n.Beside()
	two.Configure(d.Name, d.Socket)
	var c2 *harness.Daemon
	unchanged(t, n, k, []string{d.Name}, func() {
		c2 = two.StartDaemon()
		conflict(t, c2, d.Name, n.RegSocket(d.Name))
	})
	if s := c.Driver(d.Name); s.State != "registered" {
		t.Errorf("the first daemon says %+v", s)
	}
	mark := k.Mark()
	c.Stop()
	k.Deregistered(mark, d.Name, soon)
	k.Registered(mark, d.Name, soon)
	c2.WaitState(d.Name, "registered", soon)

}

// With the same configuration root there is one control socket: the second daemon runs without it,
// logs that, and takes it over when the first one has ended.
func TestTwoDaemonsOneControlSocket(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	c2 := n.StartDaemonBehind()
	unchanged(t, n, k, []string{d.Name}, func() {
		harness.Eventually(t, soon, "the second daemon says it", func() string {
			if !strings.Contains(c2.Log(), "without a control socket") || !strings.Contains(c2.Log(), "conflict") {
				return c2.Log()
			}
			return ""
		})
	})
	mark := k.Mark()
	c.Stop()
	k.Deregistered(mark, d.Name, soon)
	k.Registered(mark, d.Name, soon)
	c2.Ready(soon)
	c2.WaitState(d.Name, "registered", soon)
}
