package system

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/e2e/built"
	"csi-registrar/internal/e2e/system/nspawn"
)

// reachable is all that cmd/sandbox may reach from inside the unit, with the reason. What it
// reaches beyond that fails the test, and so does what it no longer reaches.
var reachable = map[string]string{
	"make a file in /dev/shm":                               "PrivateDevices= makes a /dev of the service's own",
	"make a file in /tmp":                                   "the service's own",
	"make a file in /var/tmp":                               "the service's own",
	"make a file in /run/csi-registrar/registrations":       "the records",
	"make a file in /run/csi-registrar/state":               "the last good configuration",
	"make a file in /var/lib/kubelet/plugins/csi-registrar": "the endpoint links",
	"make a file in /var/lib/kubelet/plugins_registry":      "the registration sockets",
	"read /etc/passwd":                                      "the names of socket_owner",
	"read /var/lib/kubelet/config.yaml":                     "no secret; the files beside it tell which volumes are in use",
	"read /var/lib/kubelet/pods/p/token":                    "the files of pods tell which volumes are in use; systemd cannot hide the rest",
	"connect to /run/driver/csi.sock":                       "a driver's socket may be anywhere below /run",
	"connect to /var/lib/kubelet/plugins/driver/csi.sock":   "and below root_dir",
	"change /proc/1/oom_score_adj":                          "root may raise it; to lower it takes a capability",
	"call kcmp":                                             "it compares what the caller may trace, which without a capability is itself",
	"signal a process of root":                              "root needs no capability for it, and Go needs tgkill",
}

// later are sockets and secrets in directories that are hidden although they are filled after the
// start.
var later = []string{
	"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/podman/podman.sock", "/run/docker/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock",
	"/run/k0s/containerd.sock", "/run/nri/nri.sock",
}

// before are sockets that are there when the unit starts: systemd's socket units make them early in
// the boot.
var before = []string{
	"/run/buildkit/buildkitd.sock", "/run/cri-dockerd.sock", "/run/docker.sock", "/run/driver/csi.sock", "/run/libvirt/libvirt-sock", "/run/snapd-snap.socket", "/run/snapd.socket",
	"/run/udev/control", "/var/lib/lxd/unix.socket", "/var/lib/kubelet/plugins/driver/csi.sock", "/var/snap/lxd/common/lxd/unix.socket", "/var/snap/microk8s/common/run/containerd.sock",
}

// TestSandbox runs a program in place of the daemon, in the shipped unit, that tries about 150
// things.
func TestSandbox(t *testing.T) {
	program, err := os.ReadFile(built.Command(t, "sandbox"))
	if err != nil {
		t.Fatal(err)
	}
	onEach(t, func(t *testing.T, suite string) {
		m := nspawn.New(t, suite)
		install(t, m)
		m.WriteMode("/usr/local/bin/sandbox", string(program), 0o755)
		for _, file := range []string{
			"/etc/rancher/k3s/k3s.yaml", "/etc/ssh/ssh_host_ed25519_key", "/etc/ssl/private/key.pem", "/etc/credstore/x", "/etc/gshadow", "/home/somebody/secret", "/root/secret",
			"/var/lib/etcd/member", "/var/lib/k0s/kubelet.conf", "/var/lib/k0s/pki/ca.key", "/var/lib/kubelet/config.yaml", "/var/lib/kubelet/kubeadm-flags.env",
			"/var/lib/kubelet/kubeconfig", "/var/lib/kubelet/bootstrap-kubeconfig", "/var/lib/kubelet/pods/p/token", "/var/lib/rancher/k3s/server/token",
			"/var/lib/systemd/random-seed", "/var/snap/microk8s/current/credentials/client.config", "/etc/csi-registrar/conf.d/10-a.toml", "/usr/lib/csi-registrar/conf.d/.keep",
			"/var/lib/kubelet/device-plugins/x",
		} {
			m.Write(file, "# what stands for a secret\n")
		}
		m.Write("/etc/systemd/system/csi-registrar.service.d/probe.conf",
			"[Service]\nType=exec\nWatchdogSec=0\nExecStart=\nExecStart=/usr/local/bin/sandbox try /var/lib/kubelet/plugins_registry/go /run/csi-registrar/state/reached\n")
		m.Boot()
		serve := func(paths []string) {
			cmd := m.Start(append([]string{"/usr/local/bin/sandbox", "serve"}, paths...)...)
			t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
			for _, path := range paths {
				m.Run("sh", "-c", "until [ -S "+path+" ]; do sleep 0.05; done")
			}
		}
		m.Run("sh", "-c", "mkdir -p /run/csi-registrar/conf.d /run/credstore && echo x >/run/credstore/x && echo >/run/csi-registrar/conf.d/10-a.toml; [ -p /run/initctl ] || mkfifo /run/initctl")
		serve(before)
		m.Run("systemctl", "start", unit)
		if modes := m.Run("stat", "-c", "%a", "/run/containerd", "/run/docker", "/run/k0s", "/run/k3s", "/run/nri"); modes != "711\n700\n755\n711\n700\n" {
			t.Errorf("the runtimes' directories have modes %q, not those that their owners give them", modes)
		}
		serve(later)
		m.Run("sh", "-c", `for path in /var/lib/kubelet/pki/key /etc/kubernetes/admin.conf /run/credentials/x; do mkdir -p $(dirname $path) && echo x >$path || exit; done
			systemctl daemon-reexec && systemctl restart dbus.socket dbus.service; touch /var/lib/kubelet/plugins_registry/go`)
		m.Eventually(soon, "the end of the program in the unit", func() error {
			if out, err := m.Try("cat", "/run/csi-registrar/state/reached"); err != nil || !strings.HasSuffix(out, "done\n") {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		})
		reached := strings.Split(strings.TrimSpace(m.Run("cat", "/run/csi-registrar/state/reached")), "\n")
		for _, what := range reached[:len(reached)-1] {
			if reachable[what] == "" {
				t.Errorf("from inside: %s", what)
			}
		}
		for what := range reachable {
			if !slices.Contains(reached, what) {
				t.Errorf("it is listed, but was not reached: %s", what)
			}
		}
		// The side units' own sandboxes can be made.
		m.Run("systemctl", "stop", unit, socket) // waits for both; each asks
		const answer = "/run/csi-registrar/state/stopped"
		if mode := m.Run("stat", "-c", "%a", answer); mode != "700\n" {
			t.Errorf("the answer to a stop has mode %q", mode)
		}
		m.Run("rm", "-f", answer)
		m.Run("systemctl", "start", "csi-registrar-sweep.service")
		if mode := m.Run("stat", "-c", "%a", answer); mode != "700\n" {
			t.Errorf("the answer to the sweep has mode %q", mode)
		}
		if log := m.Journal(); strings.Contains(log, "status=226") {
			t.Error("a sandbox could not be made")
		}
	})
}
