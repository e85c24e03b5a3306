package system

import (
	"fmt"
	"strings"
	"testing"

	"csi-registrar/internal/e2e/system/nspawn"
)

// TestSandbox runs a script in place of the daemon, in the shipped unit: what belongs to root is out
// of its reach, also what appeared after its start, and what the daemon needs is not.
func TestSandbox(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		m := nspawn.New(t, suite)
		install(t, m)
		// What stands for the sockets and secrets of others, made when the daemon runs already.
		const later = "/run/containerd/containerd.sock /run/crio/crio.sock /run/podman/podman.sock /run/docker/containerd/containerd.sock /run/k3s/containerd/containerd.sock " +
			"/run/k0s/containerd.sock /var/lib/kubelet/pki/key /etc/kubernetes/admin.conf /run/credentials/x /root/secret"
		m.WriteMode("/usr/local/bin/probe", `#!/bin/sh
# Whatever is reached is printed; also by what /proc shows of other processes.
for root in "" /proc/[0-9]*/root; do
	for path in /run/systemd/private /run/systemd/system /run/dbus/system_bus_socket /var/lib/systemd/random-seed `+later+`; do
		[ ! -e "$root$path" ] || echo "reached $root$path"
	done
	cat "$root/etc/shadow" 2>/dev/null
done
[ ! -e /proc/1/root/ ] || echo "reached the root of PID 1"
# The one program that knows a second way to PID 1.
mkdir -p /var/lib/kubelet/probe/run/csi-registrar
csi-registrar cleanup --ask --config-root /var/lib/kubelet/probe 2>&1 | grep -q 'cannot ask the service manager' || echo "asked PID 1"
systemctl start victim.service 2>/dev/null && echo "started a unit"
for path in /run/systemd/notify /run/systemd/journal/socket /var/lib/kubelet /etc/passwd; do
	[ -e "$path" ] || echo "missing $path"
done
touch /var/lib/kubelet/x /run/csi-registrar/x || echo "cannot write"
touch /run/x 2>/dev/null && echo "can write to /run"
echo done
`, 0o755)
		m.Write("/etc/systemd/system/victim.service", "[Service]\nType=oneshot\nExecStart=/bin/touch /var/victim\n")
		m.Write("/etc/systemd/system/csi-registrar.service.d/probe.conf",
			"[Service]\nType=exec\nWatchdogSec=0\nExecStart=\n"+
				"ExecStart=/bin/sh -c 'until [ -e /var/lib/kubelet/go ]; do sleep 0.1; done; probe >/run/csi-registrar/reached 2>&1; sleep 1000'\n")
		m.Boot()
		m.Run("systemctl", "start", unit)
		if modes := m.Run("stat", "-c", "%a", "/run/containerd", "/run/docker", "/run/k0s", "/run/k3s"); modes != "711\n700\n755\n711\n" {
			t.Errorf("the runtimes' directories have modes %q, not those that their owners give them", modes)
		}
		m.Run("sh", "-c", `for path in `+later+`; do mkdir -p $(dirname $path) && touch $path || exit; done
			systemctl daemon-reexec && systemctl restart dbus.socket dbus.service; touch /var/lib/kubelet/go`)
		m.Eventually(soon, "the probe's end", func() error {
			out, err := m.Try("cat", "/run/csi-registrar/reached")
			if err != nil || !strings.Contains(out, "done\n") {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		})
		if out := m.Run("cat", "/run/csi-registrar/reached"); out != "done\n" {
			t.Errorf("from inside: %s", out)
		}
		if _, err := m.Try("test", "-e", "/var/victim"); err == nil {
			t.Error("a unit was started from inside")
		}
		// The side units' own sandboxes can be made.
		m.Run("systemctl", "stop", unit, socket) // waits for both; each asks
		if answer := m.Run("cat", "/run/csi-registrar/stopped"); answer != "stopped\n" {
			t.Errorf("the answer to a stop is %q", answer)
		}
		m.Run("rm", "-f", "/run/csi-registrar/stopped")
		m.Run("systemctl", "start", "csi-registrar-sweep.service")
		if answer := m.Run("cat", "/run/csi-registrar/stopped"); answer != "stopped\n" {
			t.Errorf("the answer to the sweep is %q", answer)
		}
		if log := m.Journal(); strings.Contains(log, "status=226") {
			t.Error("a sandbox could not be made")
		}
	})
}
