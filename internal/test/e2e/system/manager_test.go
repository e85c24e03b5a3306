package system

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// hold is how long PID 1 is stopped: half of WatchdogSec=.
const hold = 10 * time.Second

// TestManagerStops stops PID 1 for 10 s, as if it reloaded thousands of units: while drivers start,
// during a restart, during a reload. All drivers are published meanwhile, and no registration is
// lost at the next restart.
func TestManagerStops(t *testing.T) {
	for _, count := range []int{1, 400} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			onMain(t, func(t *testing.T, suite string) {
				n := fakesNode(t, suite, count)
				n.stopManager(func() {
					start := time.Now()
					n.serve(n.drivers...)
					n.published()
					t.Logf("%d drivers published in %s while PID 1 was stopped", count, time.Since(start).Round(time.Millisecond))
				})
				n.kept("a publication", func() { n.replaced("systemctl", "restart", unit) })

				for range 3 {
					delay := rand.N(300 * time.Millisecond)
					n.kept(fmt.Sprintf("a restart that it left after %s", delay), func() {
						old := n.show(unit, "MainPID")
						n.Run("systemctl", "--no-block", "restart", unit)
						time.Sleep(delay) // at a random moment of the restart
						n.stopManager(func() {})
						n.another(old)
					})
				}

				// While a command of the unit runs, another command and a new driver arrive.
				const late = "late.example"
				n.Run("systemctl", "--no-block", "reload", unit)
				n.stopManager(func() {
					n.configure("50-late", late)
					n.serve(late)
					n.Run("csi-registrar", "reload")
					n.drivers = append(n.drivers, late)
					n.published()
				})
				n.kept("a reload", func() { n.replaced("systemctl", "restart", unit) })
			})
		})
	}
}

// TestThousandDrivers checks that the descriptor store has room for a thousand drivers, and that
// the daemon starts with them.
func TestThousandDrivers(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		const count = 1000
		n := fakesNode(t, suite, count)
		n.serve(n.drivers...)
		n.published()
		n.allRegistered()
		if got := n.show(unit, "FileDescriptorStoreMax"); got != "4096" {
			t.Errorf("FileDescriptorStoreMax=%s", got)
		}
		for _, how := range [][]string{{"systemctl", "restart", unit}, {"sh", "-c", "kill -KILL PID"}} {
			start := time.Now()
			n.kept(strings.Join(how, " "), func() { n.replaced(how...) })
			t.Logf("%s: all registered again, seen after %s", strings.Join(how, " "), time.Since(start).Round(time.Millisecond))
		}
		n.Eventually(soon, "a descriptor for each in the store", func() error {
			if got := n.show(unit, "NFileDescriptorStore"); got != fmt.Sprint(count) {
				return fmt.Errorf("NFileDescriptorStore=%s", got)
			}
			return nil
		})
	})
}

// fakesNode boots a node whose drivers are fakes in this process, not started yet. Its kubelet
// accepts all, because these tests only need to know what it sees.
func fakesNode(t *testing.T, suite string, count int) *node {
	t.Helper()
	n := emptyNode(t, suite)
	n.Write("/etc/systemd/system/kubelet.service.d/record.conf", "[Service]\nExecStart=\nExecStart=/w/kubelet --root /var/lib/kubelet --handler record\n")
	for i := range count {
		n.drivers = append(n.drivers, fmt.Sprintf("d%d.example", i))
	}
	n.configure("30-fakes", n.drivers...)
	n.Boot()
	return n
}

func (n *node) configure(file string, names ...string) {
	n.t.Helper()
	var b strings.Builder
	for _, name := range names {
		b.WriteString(driverConfig(name))
	}
	n.Write("/etc/csi-registrar/conf.d/"+file+".toml", b.String())
}

// serve starts fake drivers in the machine's file system.
func (n *node) serve(names ...string) {
	n.t.Helper()
	for _, name := range names {
		d := fake.NewDriver(n.Path("/run/csi-"+name+"/csi.sock"), fake.Healthy(name))
		if _, err := d.Start(); err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(d.Kill)
	}
}

// stopManager stops PID 1 for 10 s, or as long as do takes.
func (n *node) stopManager(do func()) {
	n.t.Helper()
	n.Signal(syscall.SIGSTOP)
	defer n.Signal(syscall.SIGCONT)
	enough := time.After(hold)
	do()
	<-enough
}

// kept checks that replacing the daemon costs no registration.
func (n *node) kept(after string, replace func()) {
	n.t.Helper()
	n.allRegistered()
	before, mark := n.inodes(), n.mark()
	replace()
	n.allRegistered()
	n.quiet(mark)
	if now := n.inodes(); !maps.Equal(now, before) {
		lost := 0
		for name := range before {
			if now[name] != before[name] {
				lost++
			}
		}
		n.t.Errorf("%s: after %s %d of %d sockets are others", n.Suite, after, lost, len(before))
	}
}

// allRegistered waits until both the daemon and the kubelet have all drivers as registered. On a
// busy machine the kubelet may deregister a driver after its notification timed out, and retry,
// while the daemon has answered it.
func (n *node) allRegistered() {
	n.t.Helper()
	n.Eventually(4*soon, "all to be registered", func() error {
		out, err := n.Try("csi-registrar", "wait", "--timeout", "55s")
		if err != nil {
			return fmt.Errorf("%w: %.1000s", err, out)
		}
		last := map[string]event{}
		for _, e := range n.events() {
			last[e.Driver] = e
		}
		for _, name := range n.drivers {
			if e := last[name]; e.Event != "register" || e.Error != "" {
				return fmt.Errorf("the kubelet saw of %s last %v", name, e)
			}
		}
		return nil
	})
}
