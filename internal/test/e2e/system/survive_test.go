package system

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// replaced runs a command that ends the daemon, and waits for the new process.
func (n *node) replaced(kill ...string) {
	n.t.Helper()
	old := n.show(unit, "MainPID")
	for i := range kill {
		kill[i] = strings.ReplaceAll(kill[i], "PID", old)
	}
	n.Run(kill...)
	n.another(old)
}

// another waits until a process has replaced the old one.
func (n *node) another(old string) {
	n.t.Helper()
	n.Eventually(soon, "a process after "+old, func() error {
		out, err := n.Try("systemctl", "show", "--property=MainPID,ActiveState", unit)
		if err != nil || strings.Contains(out, "MainPID="+old+"\n") || !strings.Contains(out, "ActiveState=active") {
			return fmt.Errorf("%s %w", out, err)
		}
		return nil
	})
}

// TestHundredEvents restarts, kills, hangs and reloads the daemon, and reloads systemd: 100 events
// in random order, of which the kubelet sees nothing.
func TestHundredEvents(t *testing.T) {
	events := []struct {
		share int
		name  string
		do    func(*node)
	}{
		{25, "restart", func(n *node) { n.replaced("systemctl", "restart", unit) }},
		{25, "kill -9", func(n *node) { n.replaced("sh", "-c", "kill -KILL PID") }},
		{10, "kill -ABRT", func(n *node) { n.replaced("sh", "-c", "kill -ABRT PID") }},
		{5, "hang", func(n *node) { n.replaced("sh", "-c", "kill -STOP PID") }}, // watchdog
		{10, "daemon-reexec", func(n *node) { n.Run("systemctl", "daemon-reexec") }},
		{10, "daemon-reload", func(n *node) { n.Run("systemctl", "daemon-reload") }},
		{15, "reload", func(n *node) { n.Run("systemctl", "reload", unit) }},
	}
	var order []int
	for i, e := range events {
		for range e.share {
			order = append(order, i)
		}
	}
	onEach(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/etc/systemd/system/csi-registrar.service.d/watchdog.conf", "[Service]\nWatchdogSec=2s\n")
		n.Boot()
		n.registered(0)
		before, mark := n.inodes(), n.mark()
		visitors := n.probe()
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 0))
		mixed := append([]int(nil), order...)
		r.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
		if suite != main && len(chosen) == 0 {
			mixed = mixed[:30]
		}
		for i, e := range mixed {
			events[e].do(n)
			n.waited()
			if after := n.inodes(); !maps.Equal(after, before) {
				t.Fatalf("after event %d, %s: inodes %v, were %v", i, events[e].name, after, before)
			}
			if saw := n.events()[mark:]; len(saw) > 0 {
				t.Fatalf("after event %d, %s: the kubelet saw %v", i, events[e].name, saw)
			}
		}
		n.quiet(mark)
		visitors.neverRefused(t)
		for _, name := range n.drivers { // and they are answered, not only accepted
			n.Run("csi-registrar", "status", name)
		}
	})
}

// TestKubeletStartsMeanwhile checks that a kubelet that starts while the daemon restarts registers
// without an error.
func TestKubeletStartsMeanwhile(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		for i, how := range [][]string{
			{"systemctl", "--no-block", "restart", unit},
			{"systemctl", "kill", "--signal=KILL", unit},
		} {
			for delay := range 5 {
				n.Run("systemctl", "stop", "kubelet.service")
				mark := n.mark()
				n.Run(how...)
				// At another moment of the restart each time.
				time.Sleep(time.Duration(delay) * 40 * time.Millisecond)
				n.Run("systemctl", "--no-block", "start", "kubelet.service")
				n.registered(mark)
				for _, e := range n.events()[mark:] {
					if e.Error != "" || e.Event == "deregister" {
						t.Errorf("way %d, delay %d: the kubelet saw %v", i, delay, e)
					}
				}
			}
		}
	})
}

// TestStoreIsFull checks that drivers that do not fit into the store are reported, and registered
// nevertheless.
func TestStoreIsFull(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/etc/systemd/system/csi-registrar.service.d/store.conf", "[Service]\nFileDescriptorStoreMax=1\nEnvironment=CSI_REGISTRAR_FDSTORE=1\n")
		n.Boot()
		n.registered(0)
		log := n.Journal("-u", unit)
		if got := strings.Count(log, "will not survive a restart"); got != 1 {
			t.Errorf("it is said %d times that the store is full, want once, for one of two:\n%s", got, log)
		}
		if got := n.show(unit, "NFileDescriptorStore"); got != "1" {
			t.Errorf("%s descriptors are stored", got)
		}
	})
}
