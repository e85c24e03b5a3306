package system

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// harmless lists what cmd/sandbox reaches from inside the unit and may reach, with the reason. With
// notPrevented this is everything: the test fails if it reaches more, or less.
var harmless = map[string]string{
	"read /etc/passwd":                  "the names of socket_owner",
	"read /var/lib/kubelet/config.yaml": "no secret; the files beside it tell which volumes are in use",
	"call kcmp":                         "it compares what the caller may trace, which without a capability is itself",
}

// harmlessUnconfined lists what it also may reach on kernels without Landlock.
var harmlessUnconfined = map[string]string{
	"make a file in /dev/shm":      "PrivateDevices= makes a /dev of the service's own",
	"make a file in /tmp":          "the service's own",
	"make a file in /var/tmp":      "the service's own",
	"change /proc/1/clear_refs":    "it only changes what counts as memory in use",
	"change /proc/1/oom_score_adj": "root may raise it; to lower it takes a capability",
}

// harmlessBefore254 lists what it also may reach there under systemd 247 and 252.
var harmlessBefore254 = map[string]string{
	"make a file in /home": "ProtectHome=tmpfs makes one of the service's own, read-only under 257",
	"make a file in /root": "the same",
}

// union returns all entries of the lists.
func union(lists ...map[string]string) map[string]string {
	all := map[string]string{}
	for _, list := range lists {
		maps.Copy(all, list)
	}
	return all
}

// later are sockets and secrets that are created after the start, in directories that are hidden.
var later = []string{
	"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/podman/podman.sock", "/run/docker/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock",
	"/run/k0s/containerd.sock", "/run/nri/nri.sock", "/run/other/service.sock", "/var/lib/kubelet/device-plugins/kubelet.sock", "/var/lib/kubelet/pod-resources/kubelet.sock",
}

// before are sockets that exist when the unit starts, because systemd's socket units create them
// early in the boot.
var before = []string{
	"/run/buildkit/buildkitd.sock", "/run/cri-dockerd.sock", "/run/docker.sock", "/run/driver/csi.sock", "/run/libvirt/libvirt-sock", "/run/snapd-snap.socket", "/run/snapd.socket",
	"/run/udev/control", "/var/lib/lxd/unix.socket", "/var/lib/kubelet/plugins/driver/csi.sock", "/var/snap/lxd/common/lxd/unix.socket", "/var/snap/microk8s/common/run/containerd.sock",
}

// TestSandbox runs a program in place of the daemon, in the shipped unit, that makes about 150
// attempts: without Landlock, with it, and below a later mount.
func TestSandbox(t *testing.T) {
	needLandlock(t)
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
			"/var/lib/kubelet/device-plugins/x", "/var/lib/kubelet/.dockercfg", "/var/lib/kubelet/config.json", "/var/lib/kubelet/plugins/kubernetes.io/csi/vol_data.json",
			"/etc/cni/net.d/calico-kubeconfig", "/etc/krb5.keytab", "/var/lib/cloud/instance/user-data.txt", "/var/lib/docker/containers/c/config.v2.json", "/var/log/secret",
		} {
			m.Write(file, "# what stands for a secret\n")
		}
		m.Write("/etc/systemd/system/csi-registrar.service.d/probe.conf",
			"[Service]\nType=exec\nWatchdogSec=0\nExecStart=\nExecStart=/usr/local/bin/sandbox try /run/csi-registrar/state\n")
		m.Boot()
		serve := func(paths []string) {
			cmd := m.Start(append([]string{"/usr/local/bin/sandbox", "serve"}, paths...)...)
			t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
			for _, path := range paths {
				m.Run("sh", "-c", "until [ -S "+path+" ]; do sleep 0.05; done")
			}
		}
		m.Run("sh", "-c", "mkdir -p /run/csi-registrar/conf.d /run/credstore && echo x >/run/credstore/x && echo >/run/csi-registrar/conf.d/10-a.toml; [ -p /run/initctl ] || mkfifo /run/initctl; mkfifo /run/fifo; for path in cloud-init/instance-data-sensitive.json containers/storage/config.json; do mkdir -p $(dirname /run/$path); echo x >/run/$path; done")
		// as root
		m.Run("systemd-run", "--unit=plain", "--property=CapabilityBoundingSet=", "sleep", "infinity")
		serve(before)
		m.Run("systemctl", "start", unit)
		if modes := m.Run("stat", "-c", "%a", "/run/containerd", "/run/docker", "/run/k0s", "/run/k3s", "/run/nri"); modes != "711\n700\n755\n711\n700\n" {
			t.Errorf("the runtimes' directories have modes %q, not those that their owners give them", modes)
		}
		serve(later)
		m.Run("sh", "-c", `for path in /var/lib/kubelet/pki/key /etc/kubernetes/admin.conf /run/credentials/x; do mkdir -p $(dirname $path) && echo x >$path || exit; done
			systemctl daemon-reexec && systemctl restart dbus.socket dbus.service`)
		mainPID := func(unit string) string { return strings.TrimSpace(m.Run("systemctl", "show", "-P", "MainPID", unit)) }
		confined := union(harmless, notPrevented)
		if suite == "bullseye" {
			maps.Copy(confined, under247)
		}
		compare := func(round string, want map[string]string) {
			const dir = "/run/csi-registrar/state/"
			m.Run("touch", dir+"go-"+round)
			m.Eventually(soon, "the end of the program's round "+round, func() error {
				_, err := m.Try("test", "-e", dir+"reached-"+round)
				return err
			})
			reached := strings.Split(strings.TrimSpace(m.Run("cat", dir+"reached-"+round)), "\n")
			for _, what := range reached {
				if want[what] == "" {
					t.Errorf("round %s: from inside: %s", round, what)
				}
			}
			for what := range want {
				if !slices.Contains(reached, what) {
					t.Errorf("round %s: it is listed, but was not reached: %s", round, what)
				}
			}
		}
		all := union(confined, harmlessUnconfined, unconfined)
		if suite == "bullseye" || suite == "bookworm" {
			maps.Copy(all, harmlessBefore254)
		}
		compare("1", all)
		compare("2", confined)
		// The mount appears in the sandbox, and only Landlock prevents writing to it.
		m.Run("sh", "-c", "cp -a /var/lib/kubelet /srv/late && mount --bind /srv/late /var/lib/kubelet")
		m.Run("nsenter", "-t", mainPID(unit), "-m", "touch", "/var/lib/kubelet/config.yaml")
		late := union(confined, belowAMount)
		maps.DeleteFunc(late, func(what, _ string) bool {
			return strings.HasPrefix(what, "make a file in /var/lib/kubelet/") || strings.HasPrefix(what, "connect to /var/lib/kubelet/")
		})
		compare("3", late)
		m.Run("umount", "/var/lib/kubelet")
		// SECURITY.md lists it under "Not prevented": systemd accepts any main process from root,
		// and kills it at the stop.
		m.Run("systemd-run", "--unit=victim", "--uid=65534", "sleep", "infinity")
		victim := mainPID("victim")
		m.Run("sh", "-c", "echo "+victim+" >/run/victim && mv /run/victim /run/csi-registrar/state/victim")
		m.Eventually(soon, "the process of another user to be the unit's main process", func() error {
			if got := mainPID(unit); got != victim {
				return fmt.Errorf("it is %s, not %s", got, victim)
			}
			return nil
		})
		// The sandboxes of the side units can be set up.
		m.Run("systemctl", "stop", unit, socket) // waits for both; each asks systemd for its job
		if got := mainPID("victim"); got != "0" {
			t.Errorf("the process of another user was not killed: %s", got)
		}
		const answer = "/run/csi-registrar/state/stopped"
		if mode := m.Run("stat", "-c", "%a", answer); mode != "700\n" {
			t.Errorf("the answer to a stop has mode %q", mode)
		}
		m.Run("rm", "-f", answer)
		m.Run("systemctl", "start", "csi-registrar-sweep.service")
		if mode := m.Run("stat", "-c", "%a", answer); mode != "700\n" {
			t.Errorf("the answer to the sweep has mode %q", mode)
		}
		// The rest of what messages to systemd can do.
		m.Write("/etc/systemd/system/csi-registrar.service.d/probe.conf",
			"[Service]\nType=exec\nWatchdogSec=0\nTimeoutStopSec=1s\nExecStart=\nExecStart=/usr/local/bin/sandbox stall\nExecStopPost=\n")
		m.Run("systemctl", "daemon-reload")
		m.Run("systemctl", "start", unit)
		m.Eventually(soon, "a status with a control character", func() error {
			if got := m.Run("systemctl", "show", "-P", "StatusText", unit); !strings.Contains(got, "\x1b[31m") {
				return fmt.Errorf("it is %q", got)
			}
			return nil
		})
		begun := time.Now()
		m.Run("systemctl", "stop", unit)
		if took := time.Since(begun); took < 3*time.Second {
			t.Errorf("EXTEND_TIMEOUT_USEC= does not delay the stop: %s", took)
		}
		if log := m.Journal(); strings.Contains(log, "status=226") {
			t.Error("a sandbox could not be made")
		}
	})
}

// needLandlock skips the test if the kernel has no Landlock, or one that does not restrict signals.
func needLandlock(t *testing.T) {
	t.Helper()
	if abi, err := ll.LandlockGetABIVersion(); abi < 6 {
		nspawn.Need(t, fmt.Sprintf("it needs Landlock as in Linux 6.12, and this kernel has version %d: %v", abi, err))
	}
}
