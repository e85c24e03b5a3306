package doctor

import (
	"fmt"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

const maxNodeID = 256 // bytes: the kubelet, and the API server for CSINode

// nodeRules holds what the driver says of the node against the rules of the kubelet and
// of the API server, which refuse the driver, or the whole CSINode object.
func nodeRules(r *csi.NodeGetInfoResponse) (found []Finding) {
	q := safetext.Quote
	add := func(id ID, severity Severity, what, expected string) {
		found = append(found, Finding{ID: id, Severity: severity, Found: what, Expected: expected})
	}
	switch n := len(r.GetNodeId()); {
	case n == 0:
		add(NodeIDInvalid, Problem, "the driver reports an empty node id", "1 to 256 characters")
	case n > maxNodeID:
		add(NodeIDInvalid, Problem, fmt.Sprintf("the node id has %d characters: the kubelet refuses it", n), "1 to 256 characters")
	}
	for _, key := range sortedKeys(r.GetAccessibleTopology().GetSegments()) {
		if err := status.CheckLabelKey(key); err != nil {
			add(TopologyInvalid, Problem, fmt.Sprintf("the topology key %s is no label key: %v", q(key), err), "PREFIX/NAME, as a label of the node has")
		}
		value := r.GetAccessibleTopology().GetSegments()[key]
		if err := status.CheckLabelValue(value); err != nil {
			add(TopologyInvalid, Problem, fmt.Sprintf("the value %s of the topology key %s is no label value: %v", q(value), q(key), err),
				"at most 63 letters, digits, '-', '_' and '.', a letter or digit at both ends")
		}
	}
	switch n := r.GetMaxVolumesPerNode(); {
	case n < 0:
		add(VolumeLimitInvalid, Problem, fmt.Sprintf("max_volumes_per_node is %d", n), "0 for no limit, or more")
	case n > math.MaxInt32:
		add(VolumeLimitInvalid, Warning, fmt.Sprintf("max_volumes_per_node is %d: the kubelet makes %d of it", n, math.MaxInt32), "0 for no limit")
	}
	return found
}
