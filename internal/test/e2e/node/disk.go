package node

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

const (
	// KubeletPath is the path of the program on the disk. doctor recognizes a kubelet by the name
	// of its process.
	KubeletPath = "/usr/local/bin/kubelet"
	// KubeletConfigPath is the path of its configuration.
	KubeletConfigPath = "/etc/kubernetes/kubelet.yaml"
)

// Settings are the settings that differ between nodes, and between a container and a virtual
// machine.
type Settings struct {
	Name        string // of the Node
	Kubeconfig  string
	Containerd  string // the runtime's configuration
	Snapshotter string
}

// Prepare writes to a disk what the kubelet, its container runtime and pods need, and enables their
// units. The caller adds the kubelet's program and configuration.
func Prepare(t testing.TB, disk *nspawn.Machine, s Settings) {
	t.Helper()
	disk.Write("/etc/hostname", s.Name+"\n")
	disk.Write("/etc/hosts", "127.0.0.1 localhost\n127.0.0.1 "+s.Name+"\n")
	disk.Write("/etc/cni/net.d/10-loopback.conflist", cni)
	disk.Write("/etc/containerd/config.toml", s.Containerd)
	disk.Write("/opt/image.tar", string(image(t, disk.Path("/bin/busybox"))))
	disk.Write("/etc/kubernetes/kubeconfig", s.Kubeconfig)
	disk.Write("/usr/lib/systemd/system/image.service", fmt.Sprintf(imageUnit, s.Snapshotter))
	disk.Write("/usr/lib/systemd/system/kubelet.service", fmt.Sprintf(kubeletUnit, s.Name))
	disk.Chroot("rm", "-f", "/etc/resolv.conf")
	disk.Write("/etc/resolv.conf", "")
	disk.Chroot("systemctl", "enable", "containerd.service", "image.service", "kubelet.service")
}

// Kubelet returns the path of the program: $KUBELET, for another version (see scripts/test.d/node),
// or the one of this module.
func Kubelet(t testing.TB) string {
	t.Helper()
	if kubelet := os.Getenv("KUBELET"); kubelet != "" {
		return kubelet
	}
	return controlplane.Binary(t)
}

// KubeletConfig returns a configuration of the kubelet for a machine without network tools, with
// additional lines.
func KubeletConfig(lines ...string) string {
	return `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
healthzPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
makeIPTablesUtilChains: false
resolvConf: ""
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
` + strings.Join(lines, "\n") + "\n"
}

// The node is Ready without a network plugin as long as all pods use the host's network.
const cni = `{"cniVersion": "0.4.0", "name": "loopback", "plugins": [{"type": "loopback"}]}`

const imageUnit = `[Unit]
Description=The image of the pods
Requires=containerd.service
After=containerd.service
Before=kubelet.service
ConditionPathExists=!/var/lib/image-imported
[Service]
Type=oneshot
ExecStart=/usr/bin/ctr -n k8s.io image import --snapshotter %s /opt/image.tar
ExecStart=/bin/touch /var/lib/image-imported
[Install]
WantedBy=multi-user.target
`

// Restarted whenever it ends, as in distributions.
const kubeletUnit = `[Unit]
Description=The kubelet
Wants=containerd.service
After=containerd.service
StartLimitIntervalSec=0
[Service]
ExecStart=` + KubeletPath + ` --config=` + KubeletConfigPath + ` --kubeconfig=/etc/kubernetes/kubeconfig \
	--cert-dir=/var/lib/kubelet/pki --hostname-override=%s --v=2
Restart=always
RestartSec=1s
[Install]
WantedBy=multi-user.target
`
