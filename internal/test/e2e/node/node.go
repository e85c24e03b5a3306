// Package node boots whole nodes for tests: Debian with systemd, containerd and the real kubelet in
// a container, with etcd and an API server, our packages and those of the sample driver, and pods
// with volumes of that driver.
//
//	n := node.New(t, "bookworm")
//	n.Install("1.2.3", "csi-registrar", "csi-sample-driver")
//	n.Boot()
//	n.Registered()
//	n.CreateVolume("data")
//	n.CreatePod(node.Writer("writer", "data"))
//	n.Running("writer")
//
// Unless documented otherwise, an error fails the test.
package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

const (
	// Name is the name of the Node and CSINode objects, except those of Join.
	Name = "node"
	// Driver is the name of the sample driver.
	Driver = "sample.csi.csi-registrar.dev"
	// Registry is the directory of the registration sockets.
	Registry = "/var/lib/kubelet/plugins_registry"
	// DriverSocket is the path of the sample driver's socket.
	DriverSocket = "/run/csi-sample/csi.sock"

	// limit is the time limit for what usually takes some seconds; generous, for machines under
	// load.
	limit = 2 * time.Minute
)

// Suites are the Debian releases with a container runtime for this kubelet: 12 and 13, with systemd
// 252 and 257. Debian 11's containerd 1.4 does not have version 1 of the runtime interface, which
// this kubelet needs.
var Suites = []string{"bookworm", "trixie"}

// Node is a machine with a kubelet. It is not for use by several goroutines.
type Node struct {
	*nspawn.Machine
	*Client
	port int // of the kubelet
}

// New prepares a node that is switched off and starts its control plane, with further flags of the
// API server. It does not install our packages. Files that are written to its disk before Boot,
// such as a drop-in of kubelet.service, take effect.
func New(t testing.TB, suite string, flags ...string) *Node {
	t.Helper()
	nspawn.Root(t, suite+"-node") // skips without root on Debian
	return Join(t, suite, controlplane.New(t, flags...), Name, 10250)
}

// Join is New for a control plane that runs already. Its nodes share its network namespace: each
// needs another name, and another port for its kubelet.
func Join(t testing.TB, suite string, cluster *controlplane.ControlPlane, name string, port int) *Node {
	t.Helper()
	n := &Node{Client: NewClient(t, cluster, limit), port: port}
	n.node = name
	n.Machine = nspawn.New(t, suite+"-node")
	n.Network = n.Cluster.Path()
	n.Args = []string{
		"--capability=all", "--system-call-filter=bpf keyctl add_key request_key openat2",
		"--bind=/dev/kmsg", // without it the kubelet exits
		"--bind-ro=" + Kubelet(t) + ":" + KubeletPath,
	}
	Prepare(t, n.Machine, Settings{Name: name, Kubeconfig: n.Cluster.Kubeconfig(), Containerd: containerd, Snapshotter: "native"})
	n.ConfigureKubelet("shutdownGracePeriod: 20s", "shutdownGracePeriodCriticalPods: 5s")
	n.Write("/usr/lib/systemd/system/tunables.service", tunables)
	n.Chroot("systemctl", "mask", "systemd-modules-load.service")
	n.Chroot("systemctl", "enable", "tunables.service")
	return n
}

// The machine has no controllers of the unified hierarchy.
const containerd = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + Image + `"
disable_cgroup = true
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
`

// The kubelet exits if it cannot set these sysctls, which belong to the host. So files with the
// required values are bound over them.
const tunables = `[Unit]
Description=The kernel's tunables, as files
Before=kubelet.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -ec 'mkdir -p /run/tunables; \
	for t in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
		kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do \
		f=/run/tunables/$$(basename "$${t%%=*}"); echo "$${t#*=}" >"$$f"; mount --bind "$$f" "/proc/sys/$${t%%=*}"; \
	done'
[Install]
WantedBy=multi-user.target
`

// During runs do. Meanwhile failures count for t, a subtest of the node's own test.
func (n *Node) During(t testing.TB, do func()) {
	outer := n.t
	n.t = t
	defer func() { n.t = outer }()
	n.Machine.During(t, do)
}

// ConfigureKubelet writes the kubelet's configuration for a container, with additional lines.
func (n *Node) ConfigureKubelet(lines ...string) {
	n.t.Helper()
	n.Write(KubeletConfigPath, KubeletConfig(append([]string{
		"cgroupDriver: cgroupfs", "cgroupsPerQOS: false", "enforceNodeAllocatable: []", "failCgroupV1: false", "failSwapOn: false",
		"localStorageCapacityIsolation: false", fmt.Sprint("port: ", n.port),
	}, lines...)...))
}

// Install installs packages of this tree as the given version, in a machine that is on or off. The
// test's TestMain must be built.Main.
func (n *Node) Install(version string, packages ...string) {
	n.t.Helper()
	var paths []string
	for _, name := range packages {
		paths = append(paths, n.Package(version, name))
	}
	n.dpkg(paths)
}

// InstallFrom installs csi-registrar from a directory with the packages of another commit, as
// scripts/packages makes them, in a machine that is on or off.
func (n *Node) InstallFrom(dir string) {
	n.t.Helper()
	n.dpkg([]string{n.copyPackage(filepath.Join(dir, "csi-registrar_*.deb"))})
}

func (n *Node) dpkg(paths []string) {
	n.t.Helper()
	install := append([]string{"dpkg", "--force-confold", "-i"}, paths...)
	if n.On() {
		n.Run(install...)
	} else {
		n.Chroot(install...)
	}
}

// Package puts a package of this tree, built as the given version, on the disk, and returns its
// path there.
func (n *Node) Package(version, name string) string {
	n.t.Helper()
	return n.copyPackage(filepath.Join(built.Packages(n.t, version), name+"_"+version+"*.deb"))
}

// copyPackage puts the package that matches the pattern on the disk, and returns its path there.
func (n *Node) copyPackage(pattern string) string {
	n.t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) != 1 {
		n.t.Fatalf("package %s: %q %v", pattern, found, err)
	}
	path := "/opt/" + filepath.Base(found[0])
	if n.Read(path) == "" {
		b, err := os.ReadFile(found[0])
		n.must(err)
		n.Write(path, string(b))
	}
	return path
}

// Registered waits until the daemon reports that the kubelet has registered all drivers.
func (n *Node) Registered() {
	n.t.Helper()
	n.Run("csi-registrar", "wait", "--timeout", "55s")
}

// KubeletHealthy waits until the kubelet answers.
func (n *Node) KubeletHealthy() {
	n.t.Helper()
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DialContext: n.Cluster.Dial, DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	n.Eventually(limit, "the kubelet to answer", func() error {
		request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, fmt.Sprintf("https://127.0.0.1:%d/healthz", n.port), nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("%s", answer.Status)
		}
		return nil
	})
}
