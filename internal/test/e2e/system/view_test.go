package system

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/system/nspawn"
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
		if log := n.Journal("-u", "kubelet.service"); strings.Contains(log, "rror when handling create event") {
			t.Error("the kubelet logs errors about publications")
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

// TestSandboxMakesTheDirectories starts the daemon without the kubelet's directories, as after a
// reset of a stopped node. A restart creates them, with the kubelet's modes, and the next sandbox
// opens them.
func TestSandboxMakesTheDirectories(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Boot()
		n.registered(0)
		n.Run("systemctl", "stop", "kubelet.service", unit, socket) // the end of the socket sweeps
		n.Run("rm", "-r", "/var/lib/kubelet")
		mark := n.mark()
		n.Run("systemctl", "start", unit)
		n.Run("systemctl", "restart", unit)
		const dir = "/var/lib/kubelet"
		if modes := n.Run("stat", "-c", "%a", dir, dir+"/plugins_registry"); modes != "750\n750\n" {
			t.Errorf("modes %q", modes)
		}
		n.Run("systemctl", "start", "kubelet.service")
		n.registered(mark)
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
	onMain(t, func(t *testing.T, suite string) {
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

// TestSandboxFollowsJournald restarts journald's sockets, which no sandbox that exists shows. The
// daemon is replaced, and its entries have their fields again.
func TestSandboxFollowsJournald(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		mark, old := n.mark(), n.show(unit, "MainPID")
		// A message between the two starts journald, and systemd starts no socket of a service
		// that runs.
		n.Run("sh", "-c", "for i in 1 2 3 4 5; do systemctl restart systemd-journald.socket systemd-journald-dev-log.socket && exit; done; exit 1")
		n.Run("csi-registrar", "reload") // logs, so that the daemon notices
		n.another(old)
		n.waited()
		n.quiet(mark)
		pid := n.show(unit, "MainPID")
		n.Eventually(soon, "an entry with its fields", func() error {
			if out := n.Journal("--output=json", "_PID="+pid, "SYSLOG_IDENTIFIER=csi-registrar"); !strings.Contains(out, `"MESSAGE_ID"`) {
				return fmt.Errorf("the journal has %s", out)
			}
			return nil
		})
	})
}

// TestAnotherRootDir uses the drop-in that `config check` prints for another root directory: it
// hides what the unit hides below the default, and creates nothing.
func TestAnotherRootDir(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		m := nspawn.New(t, suite)
		install(t, m)
		m.Write("/etc/csi-registrar/config.toml", "[kubelet]\nroot_dir = \"/data/kube let\"\n")
		for _, name := range []string{"plugins_registry/.keep", "pods/file", "pki/key", "config.json"} {
			m.Write("/data/kube let/"+name, "content of "+name)
		}
		m.Boot()
		m.Run("sh", "-c", `cd /etc/systemd/system && mkdir -p csi-registrar.service.d &&
			csi-registrar config check | sed -n '/^# /,$p' >csi-registrar.service.d/root-dir.conf && systemctl daemon-reload && systemctl start csi-registrar`)
		pid := strings.TrimSpace(m.Run("systemctl", "show", "-P", "MainPID", unit))
		seen := m.Run("nsenter", "-t", pid, "-m", "sh", "-c", `cd "/data/kube let" && touch plugins_registry/x && cat pods/file && cat pki/key config.json 2>/dev/null || true`)
		if seen != "content of pods/file" {
			t.Errorf("the daemon sees %q", seen)
		}
		if left := m.Run("ls", "-A", "/data/kube let"); left != "config.json\npki\nplugins_registry\npods\n" {
			t.Errorf("root_dir has\n%s", left)
		}
	})
}
