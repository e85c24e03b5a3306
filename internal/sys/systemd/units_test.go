package systemd

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// unitSettings reads a unit file, or a drop-in, into its settings: all values of a key, in order.
func unitSettings(t *testing.T, path string) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "..", "systemd", path))
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && !strings.HasPrefix(key, "#") {
			settings[key] = append(settings[key], value)
		}
	}
	return settings
}

// TestUnitSettingsHaveAnEffect: a setting that does nothing looks like protection.
func TestUnitSettingsHaveAnEffect(t *testing.T) {
	for _, path := range []string{
		"csi-registrar.service", "csi-registrar.socket", "csi-registrar-http.socket", "csi-registrar-sweep.service",
		"csi-registrar-wait.service", "csi-registrar-wait@.service", "csi-registrar-.service.d/sandbox.conf",
	} {
		settings := unitSettings(t, path)
		if settings["RemoveIPC"] != nil && settings["User"] == nil {
			t.Errorf("%s: RemoveIPC= has no effect without User=", path)
		}
		if settings["DevicePolicy"] != nil && slices.Equal(settings["PrivateDevices"], []string{"yes"}) {
			t.Errorf("%s: PrivateDevices= implies DevicePolicy=", path)
		}
	}
}

// TestSocketHasTheSandboxOfTheSideUnits: systemd reads no [Service] section for a socket, so its
// sandbox is written a second time.
func TestSocketHasTheSandboxOfTheSideUnits(t *testing.T) {
	want := unitSettings(t, "csi-registrar-.service.d/sandbox.conf")
	got := unitSettings(t, "csi-registrar.socket")
	if len(want) < 20 {
		t.Fatalf("the drop-in has %d settings only", len(want))
	}
	// The socket itself is in these namespaces and filters too, and a memory limit kills nothing
	// here.
	for _, key := range []string{"PrivateNetwork", "IPAddressDeny", "MemoryMax", "UMask"} {
		delete(want, key)
	}
	for key, values := range want {
		if !slices.Equal(got[key], values) {
			t.Errorf("csi-registrar.socket has %s=%q, the drop-in %q", key, got[key], values)
		}
	}
}

// sandbox are the settings of the sandbox that every unit has. TestSandbox tries what they prevent
// on a booted machine; here a setting that is lost is noticed without one.
var sandbox = map[string]string{
	"CapabilityBoundingSet": "", "NoNewPrivileges": "yes",
	"RestrictAddressFamilies": "AF_UNIX", "PrivateIPC": "yes", "KeyringMode": "private",
	"PrivateTmp": "yes", "PrivateDevices": "yes", "ProtectProc": "invisible", "ProcSubset": "pid",
	"ProtectKernelTunables": "yes", "ProtectKernelModules": "yes", "ProtectKernelLogs": "yes", "ProtectControlGroups": "yes", "ProtectClock": "yes", "ProtectHostname": "yes",
	"RestrictNamespaces": "yes", "RestrictRealtime": "yes", "RestrictSUIDSGID": "yes", "LockPersonality": "yes", "MemoryDenyWriteExecute": "yes",
	"SystemCallArchitectures": "native", "SystemCallErrorNumber": "EPERM", "ReadOnlyPaths": "/run", "ProtectHome": "tmpfs", "TemporaryFileSystem": "/run/systemd:ro",
}

// sandboxOfServices are settings that a socket cannot have: they would apply to the socket itself.
var sandboxOfServices = map[string]string{"PrivateNetwork": "yes", "IPAddressDeny": "any", "UMask": "0077"}

// hiddenFromAll are the paths that every unit hides, and hiddenFromDaemon those that it also hides
// from the daemon, which runs for as long as the node. Each has the reason.
var hiddenFromAll = map[string]string{
	"/run/dbus": "starts units", "/run/initctl": "reboots", "/run/udev": "makes device nodes", "/run/credentials": "secrets of other units", "/dev/pts": "what root types",
	"/run/containerd": "a runtime", "/run/crio": "a runtime", "/run/podman": "a runtime", "/run/k3s": "a runtime", "/run/k0s": "a runtime", "/run/docker": "a runtime", "/run/docker.sock": "a runtime",
	"/run/nri": "changes containers", "/run/snapd.socket": "runs programs of root", "/run/snapd-snap.socket": "runs programs of root",
	"/etc/shadow": "passwords", "/etc/kubernetes": "the keys of the cluster", "/var/lib/kubelet/pki": "the keys of the kubelet",
	"/var/lib/kubelet/device-plugins": "what pods are given", "/var/lib/kubelet/pod-resources": "which devices pods have",
}

var hiddenFromDaemon = map[string]string{
	"/etc/rancher": "kubeconfigs", "/var/lib/etcd": "the cluster's secrets", "/var/lib/k0s/pki": "keys", "/var/lib/k0s/kubelet.conf": "a kubeconfig",
	"/etc/ssh": "host keys", "/etc/ssl/private": "keys", "/etc/credstore": "secrets of units", "/run/credstore": "secrets of units", "/var/lib/systemd": "the key of credstore.encrypted",
	"/etc/cni": "tokens of the network's plugins", "/var/lib/cloud": "tokens with which the node joined", "/run/cloud-init": "tokens with which the node joined",
	"/var/lib/rancher/k3s": "keys", "/var/lib/rancher/rke2": "keys", "/var/lib/rancher/agent": "keys", "/var/lib/rancher/capr": "keys",
	"/var/snap/microk8s/current": "keys", "/var/snap/microk8s/common/run": "a runtime", "/run/libvirt": "starts machines", "/run/buildkit": "builds as root",
	"/var/lib/lxd": "starts containers", "/var/snap/lxd": "starts containers", "/run/cri-dockerd.sock": "a runtime",
	"/etc/shadow-": "passwords", "/etc/gshadow": "passwords", "/etc/gshadow-": "passwords",
	"/var/lib/kubelet/kubeconfig": "the kubelet's", "/var/lib/kubelet/bootstrap-kubeconfig": "the kubelet's",
	"/var/lib/kubelet/config.json": "the pull secrets of the node", "/var/lib/kubelet/.dockercfg": "the pull secrets of the node",
}

// forbidden are the system calls, and groups of them, that no unit can make. filesystemCalls are
// denied with their group, unless a later line names them.
var (
	forbidden = append([]string{"@privileged", "@resources", "@aio", "@keyring", "process_vm_readv", "process_vm_writev", "prlimit64", "open_tree", "@file-system"},
		filesystemCalls...)
	filesystemCalls = []string{
		"chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "futimesat", "utimensat", "mknod", "mknodat", "file_setattr",
		"setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
	}
)

// TestShippedSandbox compares the settings of each unit's sandbox with what is promised.
func TestShippedSandbox(t *testing.T) {
	for path, hidden := range map[string]map[string]string{
		"csi-registrar.service":                 hiddenFromDaemon,
		"csi-registrar-.service.d/sandbox.conf": nil,
		"csi-registrar.socket":                  nil,
	} {
		got := unitSettings(t, path)
		want := maps.Clone(sandbox)
		if !strings.HasSuffix(path, ".socket") {
			maps.Copy(want, sandboxOfServices)
		}
		for key, value := range want {
			if !slices.Equal(got[key], []string{value}) {
				t.Errorf("%s has %s=%q, want %q", path, key, got[key], value)
			}
		}
		all := maps.Clone(hiddenFromAll)
		maps.Copy(all, hidden)
		if got, want := masks(got), slices.Sorted(maps.Keys(all)); !slices.Equal(got, want) {
			t.Errorf("%s hides\n%s\nwant\n%s", path, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		denied, allowed := filtered(got["SystemCallFilter"])
		for _, call := range forbidden {
			if !denied[call] && (allowed[call] || !slices.Contains(filesystemCalls, call)) {
				t.Errorf("%s admits %s", path, call)
			}
		}
	}
	service := unitSettings(t, "csi-registrar.service")
	for key, want := range map[string][]string{
		"ProtectSystem":        {"strict"},
		"ReadWritePaths":       {"-/var/lib/kubelet/plugins_registry"},
		"RuntimeDirectory":     {"csi-registrar/registrations csi-registrar/state"},
		"RuntimeDirectoryMode": {"0700"},
	} {
		if got := service[key]; !slices.Equal(got, want) {
			t.Errorf("csi-registrar.service has %s=%q, want %q", key, got, want)
		}
	}
	// All that is visible of /run/systemd.
	shown := slices.DeleteFunc(slices.Clone(service["BindReadOnlyPaths"]), func(s string) bool { return strings.HasPrefix(s, inaccessible) })
	if want := []string{"/run/systemd/notify -/run/systemd/journal/socket"}; !slices.Equal(shown, want) {
		t.Errorf("csi-registrar.service shows %q, want %q", shown, want)
	}
	_, allowed := filtered(service["SystemCallFilter"])
	for _, call := range []string{"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} {
		if !allowed[call] {
			t.Errorf("csi-registrar.service does not admit %s", call)
		}
	}
	if !slices.Contains(service["Environment"], "CSI_REGISTRAR_LANDLOCK=1") {
		t.Error("csi-registrar.service does not ask for Landlock")
	}
}

// inaccessible begins a setting that hides a path.
const inaccessible = "-/run/systemd/inaccessible/dir:"

// masks returns the paths that a unit hides.
func masks(settings map[string][]string) (paths []string) {
	for _, value := range settings["InaccessiblePaths"] {
		for path := range strings.FieldsSeq(value) {
			paths = append(paths, strings.TrimPrefix(path, "-"))
		}
	}
	for _, value := range settings["BindReadOnlyPaths"] {
		if path, ok := strings.CutPrefix(value, inaccessible); ok {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths
}

// filtered returns what the lines of a filter, of which the later ones count, deny and allow.
func filtered(lines []string) (denied, allowed map[string]bool) {
	denied, allowed = map[string]bool{}, map[string]bool{}
	for _, line := range lines {
		calls, deny := strings.CutPrefix(line, "~")
		for call := range strings.FieldsSeq(calls) {
			denied[call], allowed[call] = deny, !deny
		}
	}
	return denied, allowed
}
