// Package distro has facts about distributions of Kubernetes: the process and the unit that run the
// kubelet, its root directory, and directories with keys.
package distro

import "slices"

// Distro is a distribution of Kubernetes, or a kind of node.
type Distro struct {
	Name string
	// Processes are the names in /proc/PID/comm that the kubelet, or a program with the kubelet
	// in it, can have.
	Processes []string
	// Units run the kubelet; a node has one of them.
	Units []string
	// RootDir is the kubelet's root directory unless an administrator chose another.
	RootDir string
	// Secrets are directories and files with keys or credentials of the cluster. Those below
	// RootDir that every kubelet has are in KubeletSecrets. The unit hides them, or nodes.md says
	// how to.
	Secrets []string
	// Note is for administrators of such a node.
	Note string
}

// DefaultRootDir is the kubelet's own default.
const DefaultRootDir = "/var/lib/kubelet"

var (
	kubelet     = []string{"kubelet"}
	kubeletUnit = []string{"kubelet.service"}
)

// Only kubeadm's row was tried on a node of its kind; the units, processes and root directories of
// the others were tried with the same kubelet. "Read" means that the facts come from the named
// sources, read in November 2026; "known" is common knowledge without a source.
var table = []Distro{
	{
		// Tried.
		Name: "kubeadm", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd"},
	},
	{
		// Read: k3s pkg/daemons/agent/agent_linux.go. Known: the units and directories of k3s'
		// installer, and those of Rancher's agents, agent and capr.
		Name: "k3s", Processes: []string{"k3s-server", "k3s-agent"}, Units: []string{"k3s.service", "k3s-agent.service"},
		RootDir: DefaultRootDir,
		Secrets: []string{"/etc/rancher", "/var/lib/rancher/k3s/agent", "/var/lib/rancher/k3s/server", "/var/lib/rancher/agent", "/var/lib/rancher/capr"},
	},
	{
		// Read: rke2 bundle/lib/systemd/system. The kubelet is a child of rke2.
		Name: "rke2", Processes: kubelet, Units: []string{"rke2-server.service", "rke2-agent.service"},
		RootDir: DefaultRootDir,
		Secrets: []string{"/etc/rancher", "/var/lib/rancher/rke2/agent", "/var/lib/rancher/rke2/server", "/var/lib/rancher/agent", "/var/lib/rancher/capr"},
	},
	{
		// Read: k0s pkg/config/cfgvars.go. A controller has a kubelet if it was installed with
		// --enable-worker or --single. --kubelet-root-dir changes the directory.
		Name: "k0s", Processes: kubelet, Units: []string{"k0sworker.service", "k0scontroller.service"}, RootDir: "/var/lib/k0s/kubelet",
		Secrets: []string{"/etc/k0s", "/var/lib/k0s/pki", "/var/lib/k0s/etcd", "/var/lib/k0s/kubelet.conf"},
	},
	{
		// Read: microk8s microk8s-resources/default-args/kubelet, snap/snapcraft.yaml.
		Name: "MicroK8s", Processes: []string{"kubelite"}, Units: []string{"snap.microk8s.daemon-kubelite.service"},
		RootDir: "/var/snap/microk8s/common/var/lib/kubelet", Secrets: []string{"/var/snap/microk8s/current"},
	},
	{
		// Read: k8s-snap src/k8s/pkg/snap/snap.go.
		Name: "Canonical Kubernetes", Processes: kubelet, Units: []string{"snap.k8s.kubelet.service"}, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/snap/k8s/common/var/lib/k8sd", "/var/snap/k8s/common/var/lib/k8s-dqlite"},
	},
	{
		// Read: k8s-snap snap/snapcraft.yaml, layout. Within the snap that is /var/lib/kubelet.
		Name: "Canonical Kubernetes, strict", Processes: kubelet, Units: []string{"snap.k8s.kubelet.service"},
		RootDir: "/var/snap/k8s/common/var/lib/kubelet",
		Secrets: []string{"/var/snap/k8s/common/var/lib/k8sd", "/var/snap/k8s/common/var/lib/k8s-dqlite"},
	},
	{
		// Read: microshift pkg/node/kubelet.go, packaging/systemd/microshift.service.
		Name: "MicroShift", Processes: []string{"microshift"}, Units: []string{"microshift.service"}, RootDir: DefaultRootDir,
		Secrets: []string{"/var/lib/microshift"},
	},
	{
		// Read: how others order units before it. Known: its kubelet is a snap with classic
		// confinement.
		Name: "Charmed Kubernetes", Processes: kubelet, Units: []string{"snap.kubelet.daemon.service"}, RootDir: DefaultRootDir,
		Secrets: []string{"/root/cdk"},
	},
	{
		// Read: amazon-eks-ami templates/shared/runtime/bin/setup-local-disks.
		Name: "EKS (Amazon Linux 2023)", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes"},
		Note:    "With local disks /var/lib/kubelet becomes a bind mount while the node starts.",
	},
	{
		// Read: AgentBaker parts/linux/cloud-init/artifacts/bind-mount.sh,
		// format-mount-nvme-root.sh.
		Name: "AKS", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes"},
		Note:    "With a temporary disk /var/lib/kubelet becomes a bind mount while the node starts, and others may write to it.",
	},
	{
		// Known.
		Name: "OpenShift and other CoreOS", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd"},
	},
	{
		// Known: Kubernetes is installed with kubeadm.
		Name: "Flatcar, SUSE MicroOS", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd"},
	},
	{
		// Known.
		Name: "kind, minikube", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/minikube/certs", "/var/lib/minikube/etcd"},
		Note:    "The node is a container or a virtual machine: install csi-registrar in there.",
	},
}

// KubeletSecrets are files and directories with credentials in every kubelet's root directory.
var KubeletSecrets = []string{"pki", "kubeconfig", "bootstrap-kubeconfig"}

// All returns all known distributions.
func All() []Distro { return slices.Clone(table) }

// Units returns the units that can run a kubelet, each once.
func Units() []string { return collect(func(d Distro) []string { return d.Units }) }

// Processes returns the names of processes that can be a kubelet, each once.
func Processes() []string { return collect(func(d Distro) []string { return d.Processes }) }

// RootDirs returns the kubelets' root directories, each once.
func RootDirs() []string { return collect(func(d Distro) []string { return []string{d.RootDir} }) }

// collect returns the values of all distributions in the order of the table, each once.
func collect(values func(Distro) []string) (all []string) {
	for _, d := range table {
		for _, v := range values(d) {
			if !slices.Contains(all, v) {
				all = append(all, v)
			}
		}
	}
	return all
}
