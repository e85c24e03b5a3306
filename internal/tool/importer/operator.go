package compat

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/sys/safetext"
)

// operator creates the DaemonSets of its drivers: the manifests that install it have no
// node-driver-registrar, and it restores one that is removed from the DaemonSets of a cluster.
type operator struct {
	name  string
	image string // part of its controller's image
	group string // API group of its custom resources, which own its DaemonSets
	owner string // name of another object that owns its DaemonSets
	label string // value of a managed-by label on its DaemonSets
}

var operators = []operator{
	{name: "Longhorn", image: "longhorn-manager", group: "longhorn.io", label: "longhorn-manager"},
	{name: "Rook", image: "rook/ceph", group: "ceph.rook.io", owner: "rook-ceph-operator"},
	{name: "ceph-csi-operator", image: "ceph-csi-operator", group: "csi.ceph.io"},
	{name: "Piraeus", image: "piraeus-operator", group: "piraeus.io", label: "piraeus-operator"},
	{name: "Trident", image: "trident-operator", group: "trident.netapp.io"},
}

// operatorWith names the first operator that matches, if any.
func operatorWith(matches func(operator) bool) string {
	if i := slices.IndexFunc(operators, matches); i >= 0 {
		return operators[i].name
	}
	return ""
}

// operatorOf names the operator that a custom resource configures, if any.
func operatorOf(o object) string {
	group, _, _ := strings.Cut(o.APIVersion, "/")
	return operatorWith(func(op operator) bool { return op.group == group })
}

// operatorIn names the operator whose controller an image contains, if any.
func operatorIn(image string) string {
	name := operatorWith(func(op operator) bool { return strings.Contains(image, op.image) })
	if name == "" && strings.Contains(image, "operator") {
		name = safetext.Word(image)
	}
	return name
}

// manager names the program that created a workload of a cluster and reverts changes to it; empty
// if a person or Helm applied the workload.
func (w *workload) manager() string {
	if len(w.OwnerReferences) > 0 {
		r := w.OwnerReferences[0]
		group, _, _ := strings.Cut(r.APIVersion, "/")
		name := operatorWith(func(op operator) bool { return op.group == group || op.owner != "" && op.owner == r.Name })
		return cmp.Or(name, safetext.Word(r.Kind+"/"+r.Name))
	}
	if w.Labels["addonmanager.kubernetes.io/mode"] == "Reconcile" {
		return "the addon manager of the cluster"
	}
	// The operators of OpenShift set no owner.
	if w.Annotations["operator.openshift.io/spec-hash"] != "" {
		return "an operator of OpenShift"
	}
	for _, key := range slices.Sorted(maps.Keys(w.Labels)) {
		value := w.Labels[key]
		if !strings.HasSuffix(key, "/managed-by") {
			continue
		}
		if name := operatorWith(func(op operator) bool { return op.label != "" && op.label == value }); name != "" {
			return name
		}
		switch {
		case value == "EKS":
			return "an EKS add-on"
		case strings.Contains(value, "operator"):
			return safetext.Word(value)
		}
	}
	return ""
}
