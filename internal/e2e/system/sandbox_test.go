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
		m.WriteMode("/usr/local/bin/probe", `#!/bin/sh
# Whatever is reached is printed.
for path in /run/systemd/private /proc/1/root/run/systemd/private /run/systemd/system /run/dbus/system_bus_socket /run/containerd/containerd.sock \
	/run/crio/crio.sock /run/podman/podman.sock /var/lib/kubelet/pki/key /etc/kubernetes/admin.conf \
	/run/credentials/x /root/secret /var/lib/systemd/random-seed; do
	[ ! -e "$path" ] || echo "reached $path"
done
cat /etc/shadow 2>/dev/null
for path in /run/systemd/notify /run/systemd/journal/socket /var/lib/kubelet /etc/passwd; do
	[ -e "$path" ] || echo "missing $path"
done
touch /var/lib/kubelet/x /run/csi-registrar/x || echo "cannot write"
touch /run/x 2>/dev/null && echo "can write to /run"
echo done
`, 0o755)
		m.Write("/etc/systemd/system/csi-registrar.service.d/probe.conf",
			"[Service]\nType=exec\nWatchdogSec=0\nExecStart=\n"+
				"ExecStart=/bin/sh -c 'until [ -e /var/lib/kubelet/go ]; do sleep 0.1; done; probe >/run/csi-registrar/reached 2>&1; sleep 1000'\n")
		m.Boot()
		m.Run("systemctl", "start", unit)
		m.Run("sh", "-c", `for path in /run/containerd/containerd.sock /run/crio/crio.sock /run/podman/podman.sock \
			/var/lib/kubelet/pki/key /etc/kubernetes/admin.conf /run/credentials/x /root/secret; do
				mkdir -p $(dirname $path) && touch $path || exit; done
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
		// The side units' own sandboxes can be made.
		m.Run("systemctl", "stop", unit)
		if answer := m.Run("cat", "/run/csi-registrar.stopped"); answer != "stopped\n" {
			t.Errorf("the answer to a stop is %q", answer)
		}
		m.Run("rm", "-f", "/run/csi-registrar.stopped")
		m.Run("systemctl", "start", "csi-registrar-sweep.service")
		if answer := m.Run("cat", "/run/csi-registrar.stopped"); answer != "stopped\n" {
			t.Errorf("the answer to the sweep is %q", answer)
		}
		if log := m.Journal(); strings.Contains(log, "status=226") {
			t.Error("a sandbox could not be made")
		}
	})
}
