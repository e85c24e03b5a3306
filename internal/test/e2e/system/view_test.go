package system

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// again is how soon a driver is registered after a restart of the kubelet: the kubelet's interval
// of a second, and a new sandbox; generous, for machines under load.
const again = 3 * time.Second

// recovers checks that all drivers are registered again after a restart of the kubelet, in a
// sandbox that opens only the plugins_registry below root_dir.
func (n *node) recovers(what string, change ...string) {
	n.t.Helper()
	n.Run("systemctl", "stop", "kubelet.service")
	for _, command := range change {
		n.Run("sh", "-c", command)
	}
	mark, begun := n.mark(), time.Now()
	n.Run("systemctl", "start", "kubelet.service")
	n.registered(mark)
	took := time.Since(begun)
	n.t.Logf("%s: %s: registered after %s", n.Suite, what, took.Round(10*time.Millisecond))
	if took > 5*again {
		n.t.Errorf("%s: registered after %s", what, took)
	}
	n.Eventually(soon, "a sandbox that is closed", func() error {
		out, err := n.Try("nsenter", "-t", n.show(unit, "MainPID"), "-m", "sh", "-c",
			"touch /var/lib/kubelet/plugins_registry/.x && rm /var/lib/kubelet/plugins_registry/.x || echo closed; touch /var/lib/kubelet/x 2>/dev/null && echo open; exit 0")
		if out != "" || err != nil {
			return fmt.Errorf("after %s: %q, %v", what, out, err)
		}
		return nil
	})
}

// TestSandboxFollowsTheDirectories checks that the daemon serves directories that replace those of
// the kubelet without a command, and that the sandbox is as closed as before.
func TestSandboxFollowsTheDirectories(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		n.recovers("a removed plugins_registry", "until rm -rf "+registry+"; do :; done; mkdir -m 750 "+registry)
		if got := strings.Count(n.Journal("-u", unit), "plugins_registry was created, and cannot be written"); got != 1 {
			t.Errorf("it ended %d times for one directory", got)
		}
		if log := n.Journal("-u", "kubelet.service"); strings.Contains(log, ".csi-reg-") && strings.Contains(log, "rror when handling create event") {
			t.Error("the kubelet logs errors about temporary names")
		}
	})
}

// TestSandboxFollowsAMount mounts over root_dir while the daemon runs. In the sandbox the mount is
// writable, and the unmount has no effect, because of the sandbox's own mounts below.
func TestSandboxFollowsAMount(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		n.recovers("a late bind mount", "mkdir -p /srv/k/plugins_registry && mount --bind /srv/k /var/lib/kubelet")
		n.recovers("its umount", "umount /var/lib/kubelet")
	})
}

// TestSandboxFollowsTheLinks removes the directory of the endpoint links. The next process creates
// it again, with the link, and the kubelet sees nothing.
func TestSandboxFollowsTheLinks(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/etc/csi-registrar/conf.d/60-link.toml", "[driver.\"one.sample.csi\"]\nendpoint_link = true\n")
		n.Boot()
		n.registered(0)
		mark := n.mark()
		const link = "/var/lib/kubelet/plugins/csi-registrar/one.sample.csi.sock"
		// The daemon may restore its link meanwhile.
		n.Run("sh", "-c", "until rm -rf /var/lib/kubelet/plugins; do :; done")
		n.Eventually(soon, "the endpoint link to be back", func() error {
			_, err := os.Readlink(n.Path(link))
			return err
		})
		n.waited()
		n.quiet(mark)
	})
}

// TestSandboxMakesTheDirectories starts the daemon without the kubelet's directories, as after a
// reset of a stopped node: it finds its way into a sandbox with all of them, and they have the same
// modes as from the kubelet.
func TestSandboxMakesTheDirectories(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Boot()
		n.registered(0)
		n.Run("systemctl", "stop", "kubelet.service", unit, socket) // the end of the socket sweeps
		n.Run("rm", "-r", "/var/lib/kubelet")
		mark := n.mark()
		n.Run("systemctl", "start", unit, "kubelet.service")
		n.registered(mark)
		const dir = "/var/lib/kubelet"
		n.Eventually(soon, "the directories with the kubelet's modes", func() error {
			modes, err := n.Try("stat", "-c", "%a", dir, dir+"/plugins", dir+"/plugins/csi-registrar")
			if err == nil && modes != strings.Repeat("750\n", 3) {
				err = fmt.Errorf("modes %q", modes)
			}
			return err
		})
		n.Run("chmod", "0755", dir)
		n.Run("systemctl", "restart", unit)
		if mode := n.Run("stat", "-c", "%a", dir); mode != "755\n" {
			t.Errorf("the mode of a directory that exists was changed to %s", mode)
		}
	})
}

// TestLandlock disables the rest of the sandbox and checks Landlock alone, which does not cover a
// directory that is recreated.
func TestLandlock(t *testing.T) {
	needLandlock(t)
	onEach(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/etc/systemd/system/csi-registrar.service.d/open.conf", "[Service]\nProtectSystem=no\nReadOnlyPaths=\nReadWritePaths=\n")
		n.Boot()
		n.registered(0)
		abi := n.Run("csi-registrar", "status", "--json")
		if !strings.Contains(abi, `"landlock_abi": `) || strings.Contains(abi, `"landlock_abi": 0`) {
			t.Fatalf("the status says %s", abi)
		}
		n.Run("systemctl", "stop", "kubelet.service")
		mark, pid := n.mark(), n.show(unit, "MainPID")
		n.Run("sh", "-c", "until rm -rf "+registry+"; do :; done; mkdir -m 750 "+registry)
		n.Run("systemctl", "start", "kubelet.service")
		n.registered(mark)
		if n.show(unit, "MainPID") == pid {
			t.Error("the process that could not write it goes on")
		}
	})
}
