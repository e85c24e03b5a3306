// Package distro has what differs between distributions of Kubernetes and matters here: the
// processes and the units that run the kubelet, and its root directory.
//
// packaging/doc/nodes.md has the table of the distributions; tests compare it with these lists.
package distro

// Units can run a kubelet; a node has one of them. The names come from the sources of the
// distributions, read in November 2026, except that of EKS on Ubuntu, which is how others refer to
// it.
var Units = []string{
	"kubelet.service",
	"k3s.service", "k3s-agent.service", // k3s install.sh
	"rke2-server.service", "rke2-agent.service", // rke2 bundle/lib/systemd/system
	// k0s pkg/install/service.go. A controller has a kubelet only with --enable-worker or --single.
	"k0sworker.service", "k0scontroller.service",
	"snap.microk8s.daemon-kubelite.service",
	"snap.k8s.kubelet.service",        // Canonical Kubernetes
	"microshift.service",              // microshift packaging/systemd
	"snap.kubelet.daemon.service",     // Charmed Kubernetes: charm-kubernetes-worker src/charm.py
	"snap.kubelet-eks.daemon.service", // EKS with Ubuntu
}

// Processes are the names in /proc/PID/comm that the kubelet, or a program with the kubelet in it,
// can have; kubelet is the first one. k3s executes itself as k3s-server (cmd/k3s/main.go).
var Processes = []string{"kubelet", "k3s-server", "k3s-agent", "kubelite", "microshift"}

// RootDirs are the kubelets' root directories unless an administrator chose another.
var RootDirs = []string{
	"/var/lib/kubelet",
	"/var/lib/k0s/kubelet",                      // k0s pkg/config/cfgvars.go, below --data-dir
	"/var/snap/microk8s/common/var/lib/kubelet", // MicroK8s: args/kubelet
	"/var/snap/k8s/common/var/lib/kubelet",      // Canonical Kubernetes, strict
}

// Runtimes are the names in /proc/PID/comm of the container runtimes that kubelets use.
var Runtimes = []string{"containerd", "crio"}
