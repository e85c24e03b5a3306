package system

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/node/pluginreg"
)

// TestJournaldStopped stops journald for a minute with its socket full, while drivers, the daemon
// and the kubelet restart: the daemon answers the kubelet and its watchdog, no registration is
// lost, and the log says afterwards what was late or dropped.
func TestJournaldStopped(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := emptyNode(t, suite)
		n.Write("/usr/lib/systemd/system/csi-sample@.service", driverUnit)
		for i := range 20 {
			n.drivers = append(n.drivers, fmt.Sprintf("s%d.sample.csi", i))
			n.Chroot("systemctl", "enable", "csi-sample@"+n.drivers[i]+".service")
		}
		n.configure("30-sample", n.drivers...)
		n.Boot()
		n.registered(0)
		mark, before := n.mark(), n.show(unit, "MainPID")

		n.Run("systemctl", "kill", "--signal=STOP", "systemd-journald.service")
		enough := time.After(time.Minute)
		// As many entries as there is room for; logger waits for more room.
		if out, err := n.Try("timeout", "20", "sh", "-c", "while echo MESSAGE=full | logger --journald; do :; done"); err == nil {
			t.Errorf("journald reads: %s", out)
		}
		calls := n.callGetInfo()
		for i := range 3 {
			n.Run("systemctl", "restart", "csi-sample@"+n.drivers[i]+".service")
		}
		beforeIt, slowBefore := calls.end()
		calls = n.callGetInfo()
		n.replaced("systemctl", "restart", unit)
		duringTheRestart, _ := calls.end()
		daemon := n.show(unit, "MainPID")
		calls = n.callGetInfo()
		for i := range 3 {
			n.Run("systemctl", "restart", "csi-sample@"+n.drivers[10+i]+".service")
		}
		n.Run("systemctl", "restart", "kubelet.service")
		n.registered(mark)
		<-enough
		afterIt, slowAfter := calls.end()
		t.Logf("GetInfo: %s at most before the restart, %s during it, %s after it", beforeIt, duringTheRestart, afterIt)
		if slowBefore || slowAfter {
			t.Error("GetInfo took more than a second twice in a row")
		}
		n.Run("systemctl", "kill", "--signal=CONT", "systemd-journald.service")

		if now := n.show(unit, "MainPID"); daemon == before || now != daemon || n.show(unit, "NRestarts") != "0" {
			t.Errorf("MainPID=%s, was %s, and %s before the restart; NRestarts=%s", now, daemon, before, n.show(unit, "NRestarts"))
		}
		for _, e := range n.events()[mark:] {
			if e.Event == "deregister" || e.Error != "" {
				t.Errorf("the kubelet saw %v", e)
			}
		}
		var late, dropped int
		n.Eventually(soon, "what was late in the journal", func() error {
			log := n.Journal("--unit="+unit, "--output=json")
			late, dropped = strings.Count(log, `"CSI_DELAYED"`), strings.Count(log, "entries of the log were dropped")
			if late == 0 {
				return fmt.Errorf("%d bytes, nothing was late", len(log))
			}
			return nil
		})
		t.Logf("%d entries were late, %d about those that were dropped", late, dropped)
		if dropped > 1 {
			t.Errorf("%d entries about what was dropped", dropped)
		}
	})
}

// getInfos calls GetInfo as a kubelet, on all registration sockets.
type getInfos struct {
	stop    context.CancelFunc
	done    sync.WaitGroup
	mu      sync.Mutex
	slowest time.Duration
	slow    bool // two in a row for one driver took more than a second, the kubelet's limit
}

// callGetInfo starts to call GetInfo every 250 ms, for each driver.
func (n *node) callGetInfo() *getInfos {
	ctx, stop := context.WithCancel(n.t.Context())
	c := &getInfos{stop: stop}
	n.t.Cleanup(func() { c.end() })
	for _, name := range n.drivers {
		path := n.Path(regSocket(name))
		c.done.Go(func() {
			for last := time.Duration(0); ; {
				began := time.Now()
				call, cancel := context.WithTimeout(context.WithoutCancel(ctx), soon)
				info, _, err := pluginreg.GetInfo(call, path)
				cancel()
				took := time.Since(began)
				if err != nil || info.Name != name {
					n.t.Errorf("%s: %q, %v", path, info.Name, err)
				}
				c.mu.Lock()
				c.slowest = max(c.slowest, took)
				c.slow = c.slow || min(took, last) > time.Second // a busy machine is slow once
				c.mu.Unlock()
				last = took
				select {
				case <-time.After(250 * time.Millisecond):
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return c
}

// end ends the calls, and returns how long the slowest took, and whether two in a row were slow.
func (c *getInfos) end() (slowest time.Duration, slow bool) {
	c.stop()
	c.done.Wait()
	return c.slowest, c.slow
}
