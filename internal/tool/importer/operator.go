package importer

import (
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/sys/safetext"
)

// manager names what created a workload of a cluster and reverts changes to it, by the owner or a
// label of the workload; empty if a person or Helm applied it.
func (w *workload) manager() string {
	if len(w.OwnerReferences) > 0 {
		r := w.OwnerReferences[0]
		return safetext.Word(r.Kind + "/" + r.Name)
	}
	if w.Labels["addonmanager.kubernetes.io/mode"] == "Reconcile" {
		return "the addon manager of the cluster"
	}
	for _, key := range slices.Sorted(maps.Keys(w.Labels)) {
		if value := w.Labels[key]; strings.HasSuffix(key, "/managed-by") && value != "" && value != "Helm" {
			return safetext.Word(value)
		}
	}
	return ""
}
