package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

// The descriptor store keeps the listeners: with twenty drivers and both kinds of restart, the
// kubelet sees nothing. The sidecar costs exactly two writes per restart.
func TestDaemonRestartsThroughTheStore(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	names := numbered("d%02d.example", 20)
	for _, name := range names {
		n.AddDriver(name).Start()
	}
	k := n.StartKubelet()
	m := n.Manager()
	c := m.StartDaemon()
	for _, name := range names {
		k.Registered(0, name, soon)
		c.WaitState(name, "registered", soon)
	}
	kubeletKept(t, n)
	unchanged(t, n, k, names, func() {
		for i := range 20 {
			sig := syscall.SIGTERM
			if i%2 == 1 {
				sig = syscall.SIGKILL
			}
			c = m.Restart(c, sig)
			for _, name := range names {
				c.WaitState(name, "registered", soon)
			}
		}
	})
	if got := m.Stored(); len(got) != len(names) {
		t.Errorf("stored: %q", got)
	}
}

// This version replaces one that used other names in the store: nobody serves its listener, so it
// leaves the store, and the driver is registered again.
func TestListenerUnderAnUnknownName(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Start()
	k := n.StartKubelet()
	m := n.Manager()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: n.RegSocket(d.Name)})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	keep(t, m, "listener_"+d.Name, l)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	c := m.StartDaemon()
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
	kubeletKept(t, n)
	want := []string{"registration-" + d.Name}
	if got := slices.Sorted(slices.Values(m.Stored())); !slices.Equal(got, want) {
		t.Errorf("stored: %q, want %q", got, want)
	}
}

// keep puts a descriptor into the store, as a process of the service does.
func keep(t *testing.T, m *harness.Manager, name string, c syscall.Conn) {
	t.Helper()
	store := systemd.NewStore(systemd.NewNotifier(func(string) string { return m.SocketPath() }), systemd.StoreOptions{})
	ctx, end := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := store.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer end()
	if err := store.Keep(ctx, name, c); err != nil {
		t.Fatal(err)
	}
}

// A kubelet that starts while no daemon runs connects to the socket in the store and waits: it
// registers as soon as the daemon runs again, without an error.
func TestKubeletStartsWhileTheDaemonIsAway(t *testing.T) {
	t.Parallel()
	n, d, m, c, k := registeredViaStore(t, "a.example")
	c.Kill()
	k.Kill()
	k = n.StartKubelet()
	c = m.StartDaemon()
	k.Registered(0, d.Name, soon)
	for _, e := range k.Events() {
		if e.Error != "" {
			t.Errorf("the kubelet was refused: %v", e)
		}
	}
	c.WaitState(d.Name, "registered", soon)
	if csiNode, _ := k.Writes(); csiNode != 0 {
		t.Errorf("%d writes of CSINode, want none: it is what it was", csiNode)
	}
}

// A kubelet restarts while the daemon runs. The daemon only notices the calls.
func TestKubeletRestarts(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	ino := n.Inode(n.RegSocket(d.Name))
	before := c.Driver(d.Name).LastGetInfoAt
	for range 3 {
		k.Kill()
		k = n.StartKubelet()
		k.Registered(0, d.Name, soon)
		if csiNode, node := k.Writes(); csiNode+node != 0 {
			t.Errorf("%d and %d writes, want none", csiNode, node)
		}
	}
	c.WaitStatus(d.Name, "a later last_get_info_at", soon, func(s harness.DriverStatus) bool {
		return s.State == "registered" && s.LastGetInfoAt.After(before)
	})
	if n.Inode(n.RegSocket(d.Name)) != ino {
		t.Error("the registration socket is another one")
	}
}

// While no daemon ran, the driver changed, was removed from the configuration, or its registration
// socket was removed. The next daemon corrects that.
func TestChangesWhileTheDaemonIsAway(t *testing.T) {
	t.Parallel()
	t.Run("another node id", func(t *testing.T) {
		t.Parallel()
		_, d, m, c, k := registeredViaStore(t, "a.example")
		c.Kill()
		mark := k.Mark()
		d.Stop()
		d.Set(func(b *fake.Answers) { b.NodeID = "another" })
		d.Start()
		c = m.StartDaemon()
		k.Registered(mark, d.Name, soon)
		if got := k.CSINode()[d.Name]; got.NodeID != "another" {
			t.Errorf("CSINode has %+v", got)
		}
		c.WaitState(d.Name, "registered", soon)
	})
	t.Run("off the configuration", func(t *testing.T) {
		t.Parallel()
		n, d, m, c, k := registeredViaStore(t, "a.example")
		c.Kill()
		mark := k.Mark()
		n.Write("conf.d/50-a.example.toml", "")
		m.StartDaemon()
		k.Deregistered(mark, d.Name, 20*time.Second)
		harness.Eventually(t, soon, "store and directory", func() string {
			if got := m.Stored(); len(got) > 0 {
				return fmt.Sprintf("stored: %q", got)
			}
			if got := n.Sockets(); len(got) != 0 {
				return "left: " + got[0]
			}
			return ""
		})
	})
	t.Run("socket removed", func(t *testing.T) {
		t.Parallel()
		n, d, m, c, k := registeredViaStore(t, "a.example")
		c.Kill()
		mark := k.Mark()
		if err := os.Remove(n.RegSocket(d.Name)); err != nil {
			t.Fatal(err)
		}
		k.Deregistered(mark, d.Name, soon)
		c = m.StartDaemon()
		k.Registered(mark, d.Name, soon)
		c.WaitState(d.Name, "registered", soon)
	})
	t.Run("driver gone", func(t *testing.T) {
		t.Parallel()
		n, d, m, c, k := registeredViaStore(t, "a.example")
		unchanged(t, n, k, []string{d.Name}, func() {
			c.Kill()
			d.Stop()
			c = m.StartDaemon()
			c.WaitStatus(d.Name, "registered and absent", soon, func(s harness.DriverStatus) bool {
				return s.State == "registered" && s.Driver == "absent"
			})
		})
	})
	t.Run("the machine lost power", func(t *testing.T) {
		t.Parallel()
		n, d, m, c, k := registeredViaStore(t, "a.example")
		c.Kill()
		if err := m.Drop(); err != nil { // nobody listens any more, but the file stays
			t.Fatal(err)
		}
		k.Kill()
		mark := harness.Accepts(n.RegSocket(d.Name))
		if mark {
			t.Fatal("somebody still listens")
		}
		c = m.StartDaemon()
		k = n.StartKubelet()
		k.Registered(0, d.Name, soon)
		for _, e := range k.Events() {
			if e.Error != "" {
				t.Errorf("the kubelet was refused: %v", e)
			}
		}
		c.WaitState(d.Name, "registered", soon)
	})
}

// The daemon restarts while the kubelet waits for the driver's NodeGetInfo. The kubelet's
// connection for its notification is closed then, and if the notification is not answered, the
// kubelet deregisters the driver (v1.36). The next daemon answers it.
func TestDaemonRestartsInTheMiddleOfARegistration(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.AddDriver("a.example")
			d.Start()
			m := n.Manager()
			c := m.StartDaemon()
			c.WaitState(d.Name, "published", soon)
			d.Set(func(b *fake.Answers) { b.Hang = map[string]bool{fake.NodeGetInfo: true} })
			asked := d.Calls(fake.NodeGetInfo)
			k := n.StartKubelet()
			harness.Eventually(t, soon, "the kubelet asks the driver", func() string {
				if d.Calls(fake.NodeGetInfo) == asked {
					return "not yet"
				}
				return ""
			})
			c = m.Restart(c, sig)
			d.Set(func(b *fake.Answers) { b.Hang = nil })
			k.Registered(0, d.Name, soon)
			c.WaitState(d.Name, "registered", soon)
			k.Quiet(k.Mark(), 2500*time.Millisecond)
			for _, e := range k.Events() {
				if e.Error != "" || e.Event == "deregister" {
					t.Errorf("the kubelet: %v", e)
				}
			}
		})
	}
}
