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

// Runtimes are the names in /proc/PID/comm of the container runtimes that kubelets use.
var Runtimes = []string{"containerd", "crio"}

var (
	kubelet     = []string{"kubelet"}
	kubeletUnit = []string{"kubelet.service"}
)

// k8sSecrets are those of Canonical Kubernetes, whatever its confinement.
var k8sSecrets = []string{"/var/snap/k8s/common/var/lib/k8sd", "/var/snap/k8s/common/var/lib/etcd",
	"/var/snap/k8s/common/var/lib/k8s-dqlite", "/var/snap/k8s/common/node-token"}

// All are the known distributions. Only kubeadm's row was tried on a node of its kind; the units,
// processes and root directories of the others were tried with the same kubelet. "Read" means that
// the facts come from the named sources, read in November 2026; "known" is common knowledge without
// a source.
var All = []Distro{
	{
		// Tried.
		Name: "kubeadm", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd"},
	},
	{
		// Read: k3s pkg/daemons/agent/agent_linux.go, pkg/agent/config/config.go (the root
		// directory), cmd/k3s/main.go (it executes itself as k3s-server), install.sh (the units,
		// and the token in a file beside each). Known: the directories of Rancher's agents, agent
		// and capr.
		Name: "k3s", Processes: []string{"k3s-server", "k3s-agent"}, Units: []string{"k3s.service", "k3s-agent.service"},
		RootDir: DefaultRootDir,
		Secrets: []string{"/etc/rancher", "/var/lib/rancher/k3s/agent", "/var/lib/rancher/k3s/server", "/var/lib/rancher/agent", "/var/lib/rancher/capr",
			"/etc/systemd/system/k3s.service.env", "/etc/systemd/system/k3s-agent.service.env"},
	},
	{
		// Read: rke2 bundle/lib/systemd/system, pkg/executor/staticpod/staticpod.go. The kubelet is
		// a child of rke2.
		Name: "rke2", Processes: kubelet, Units: []string{"rke2-server.service", "rke2-agent.service"},
		RootDir: DefaultRootDir,
		Secrets: []string{"/etc/rancher", "/var/lib/rancher/rke2/agent", "/var/lib/rancher/rke2/server", "/var/lib/rancher/agent", "/var/lib/rancher/capr"},
	},
	{
		// Read: k0s pkg/config/cfgvars.go, pkg/component/worker/kubelet.go, pkg/install/service.go,
		// pkg/apis/k0s/v1beta1/storage.go (db, with --single). A controller has a kubelet if it was
		// installed with --enable-worker or --single. --kubelet-root-dir and --data-dir change the
		// directory. pkg/component/controller/workerconfig/reconciler.go makes the kubelet leave
		// the cgroup of the unit for that of a containerd.service, which need not exist.
		Name: "k0s", Processes: kubelet, Units: []string{"k0sworker.service", "k0scontroller.service"}, RootDir: "/var/lib/k0s/kubelet",
		Secrets: []string{"/etc/k0s", "/var/lib/k0s/pki", "/var/lib/k0s/etcd", "/var/lib/k0s/db", "/var/lib/k0s/kubelet.conf"},
	},
	{
		// Read: microk8s microk8s-resources/default-args/kubelet, snap/snapcraft.yaml,
		// snap/hooks/install. current is a link to the directory of a revision.
		Name: "MicroK8s", Processes: []string{"kubelite"}, Units: []string{"snap.microk8s.daemon-kubelite.service"},
		RootDir: "/var/snap/microk8s/common/var/lib/kubelet", Secrets: []string{"/var/snap/microk8s/current"},
	},
	{
		// Read: k8sd pkg/snap/snap.go, k8s-snap k8s/lib.sh. k8s-dqlite is the datastore of clusters
		// from before 1.34.
		Name: "Canonical Kubernetes", Processes: kubelet, Units: []string{"snap.k8s.kubelet.service"}, RootDir: DefaultRootDir,
		Secrets: append([]string{"/etc/kubernetes"}, k8sSecrets...),
	},
	{
		// Read: k8s-snap snap/snapcraft.yaml of the branch strict/main, layout. Within the snap
		// that is /var/lib/kubelet, and its /etc/kubernetes is another directory of the node, too.
		Name: "Canonical Kubernetes, strict", Processes: kubelet, Units: []string{"snap.k8s.kubelet.service"},
		RootDir: "/var/snap/k8s/common/var/lib/kubelet",
		Secrets: append([]string{"/var/snap/k8s/common/etc/kubernetes"}, k8sSecrets...),
	},
	{
		// Read: microshift pkg/node/kubelet.go, pkg/config/files.go,
		// packaging/systemd/microshift.service, packaging/crio.conf.d (the pull secret).
		Name: "MicroShift", Processes: []string{"microshift"}, Units: []string{"microshift.service"}, RootDir: DefaultRootDir,
		Secrets: []string{"/var/lib/microshift", "/var/lib/microshift-backups", "/etc/crio/openshift-pull-secret"},
	},
	{
		// Read: charm-kubernetes-worker src/charm.py, charm-lib-kubernetes-snaps
		// charms/kubernetes_snaps.py: a snap with classic confinement.
		Name: "Charmed Kubernetes", Processes: kubelet, Units: []string{"snap.kubelet.daemon.service"}, RootDir: DefaultRootDir,
		Secrets: []string{"/root/cdk"},
	},
	{
		// Read: amazon-eks-ami templates/al2023/runtime: bin/setup-local-disks, and kubelet.service
		// and nodeadm-run.service in rootfs/etc/systemd/system.
		Name: "EKS (Amazon Linux 2023)", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes"},
		Note:    "With local disks /var/lib/kubelet becomes a bind mount while the node starts.",
	},
	{
		// Read: how others order units before it, and stop it to mount a disk over its directory.
		// Known: Canonical's images have the kubelet as a snap with classic confinement.
		Name: "EKS (Ubuntu)", Processes: kubelet, Units: []string{"snap.kubelet-eks.daemon.service"}, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes"},
	},
	{
		// Read: AgentBaker parts/linux/cloud-init/artifacts: kubelet.service, which makes a bind
		// mount of the directory to itself if there is none, bind-mount.sh, ubuntu/gb.
		Name: "AKS", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes"},
		Note:    "/var/lib/kubelet becomes a bind mount while the node starts: of a temporary disk, and then everybody may write to it, or of itself.",
	},
	{
		// Read: machine-config-operator templates, pkg/daemon/daemon.go, pkg/server/server.go. A
		// machine config has the pull secret, as config.json has.
		Name: "OpenShift and other CoreOS", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd", "/var/lib/kubelet/config.json", "/etc/machine-config-daemon", "/etc/mcs-machine-config-content.json"},
	},
	{
		// Known: Kubernetes is installed with kubeadm.
		Name: "Flatcar, SUSE MicroOS", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd"},
	},
	{
		// Read: kind images/base, minikube pkg/minikube/vmpath/constants.go,
		// pkg/minikube/machine/machine.go (a copy of /etc/kubernetes in backup),
		// deploy/iso/minikube-iso, deploy/kicbase.
		Name: "kind, minikube", Processes: kubelet, Units: kubeletUnit, RootDir: DefaultRootDir,
		Secrets: []string{"/etc/kubernetes", "/var/lib/etcd", "/var/lib/minikube"},
		Note:    "The node is a container or a virtual machine: install csi-registrar in there.",
	},
}

// KubeletSecrets are files and directories with credentials in every kubelet's root directory.
var KubeletSecrets = []string{"pki", "kubeconfig", "bootstrap-kubeconfig"}

// Units returns the units that can run a kubelet, each once.
func Units() []string { return collect(func(d Distro) []string { return d.Units }) }

// Processes returns the names of processes that can be a kubelet, each once.
func Processes() []string { return collect(func(d Distro) []string { return d.Processes }) }

// RootDirs returns the kubelets' root directories, each once.
func RootDirs() []string { return collect(func(d Distro) []string { return []string{d.RootDir} }) }

// collect returns the values of all distributions in the order of the table, each once.
func collect(values func(Distro) []string) (all []string) {
	for _, d := range All {
		for _, v := range values(d) {
			if !slices.Contains(all, v) {
				all = append(all, v)
			}
		}
	}
	return all
}
