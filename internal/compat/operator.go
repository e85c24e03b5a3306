package compat

import (
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/safetext"
)

// operators make the DaemonSets of their drivers themselves: the manifests that install them have
// no node-driver-registrar, and they put it back into the DaemonSets of a cluster.
var operators = []struct {
	name  string
	image string // part of its controller's image
	group string // API group of its custom resources, which own its DaemonSets
	owner string // name of another object that owns its DaemonSets
	label string // value of a managed-by label on its DaemonSets
}{
	{name: "Longhorn", image: "longhorn-manager", group: "longhorn.io", label: "longhorn-manager"},
	{name: "Rook", image: "rook/ceph", group: "ceph.rook.io", owner: "rook-ceph-operator"},
	{name: "ceph-csi-operator", image: "ceph-csi-operator", group: "csi.ceph.io"},
	{name: "Piraeus", image: "piraeus-operator", group: "piraeus.io", label: "piraeus-operator"},
	{name: "Trident", image: "trident-operator", group: "trident.netapp.io"},
}

// operatorOf names the operator that a custom resource configures, if any.
func operatorOf(o object) string {
	group, _, _ := strings.Cut(o.APIVersion, "/")
	for _, op := range operators {
		if group == op.group {
			return op.name
		}
	}
	return ""
}

// operatorIn names the operator that an image is the controller of, if any.
func operatorIn(image string) string {
	for _, op := range operators {
		if strings.Contains(image, op.image) {
			return op.name
		}
	}
	if strings.Contains(image, "operator") {
		return safetext.Word(image)
	}
	return ""
}

// manager names what made a workload of a cluster and puts back what is removed from it; empty if
// the workload was applied by a person or by Helm.
func (w *workload) manager() string {
	if len(w.OwnerReferences) > 0 {
		r := w.OwnerReferences[0]
		group, _, _ := strings.Cut(r.APIVersion, "/")
		for _, op := range operators {
			if group == op.group || op.owner != "" && r.Name == op.owner {
				return op.name
			}
		}
		return safetext.Word(r.Kind + "/" + r.Name)
	}
	if w.Labels["addonmanager.kubernetes.io/mode"] == "Reconcile" {
		return "the addon manager of the cluster"
	}
	for _, key := range slices.Sorted(maps.Keys(w.Labels)) {
		value := w.Labels[key]
		if !strings.HasSuffix(key, "/managed-by") {
			continue
		}
		for _, op := range operators {
			if op.label != "" && value == op.label {
				return op.name
			}
		}
		if strings.Contains(value, "operator") {
			return safetext.Word(value)
		}
	}
	return ""
}
