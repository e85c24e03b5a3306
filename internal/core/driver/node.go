package driver

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/node/csiname"
)

// Limits of NodeGetInfo's answer.
const (
	maxNodeID   = 256 // bytes: the kubelet (v1.36), and the API server for a CSINode
	maxTopology = 128 // keys: our own limit
	maxKeyShown = 80  // characters of a topology key in a message
)

// NodeField is the part of NodeGetInfo's answer that a NodeProblem is about.
type NodeField int

// The fields.
const (
	NodeID NodeField = iota
	Topology
	VolumeLimit
)

// NodeProblem is a rule that NodeGetInfo's answer breaks.
type NodeProblem struct {
	Field    NodeField
	Found    string
	Expected string
	Accepted bool // the kubelet accepts the answer and changes it
}

// CheckNode compares NodeGetInfo's answer with the rules of the kubelet and of the API server,
// which otherwise refuse the driver or the CSINode object: a topology is the keys and values of
// node labels.
func CheckNode(info *csi.NodeGetInfoResponse) (problems []NodeProblem) {
	add := func(field NodeField, expected, found string, args ...any) {
		problems = append(problems, NodeProblem{Field: field, Found: fmt.Sprintf(found, args...), Expected: expected})
	}
	switch n := len(info.GetNodeId()); {
	case n == 0:
		add(NodeID, "1 to 256 bytes", "the node ID is empty")
	case n > maxNodeID:
		add(NodeID, "1 to 256 bytes", "the node ID has %d bytes", n)
	}
	topology := info.GetAccessibleTopology().GetSegments()
	if len(topology) > maxTopology {
		add(Topology, fmt.Sprintf("at most %d", maxTopology), "the topology has %d keys", len(topology))
		topology = nil // one problem, not a thousand
	}
	for _, key := range slices.Sorted(maps.Keys(topology)) {
		if err := csiname.CheckLabelKey(key); err != nil {
			add(Topology, "PREFIX/NAME, as in a label of a node", "the topology key %s is not a label key: %v", quote(key, maxKeyShown), err)
		}
		if err := csiname.CheckLabelValue(topology[key]); err != nil {
			add(Topology, "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
				"the value %s of the topology key %s is not a label value: %v", quote(topology[key], maxKeyShown), quote(key, maxKeyShown), err)
		}
	}
	switch n := info.GetMaxVolumesPerNode(); {
	case n < 0:
		add(VolumeLimit, "0 for no limit, or more", "max_volumes_per_node is %d", n)
	case n > math.MaxInt32:
		add(VolumeLimit, "0 for no limit", "max_volumes_per_node is %d, of which the kubelet makes %d", n, math.MaxInt32)
		problems[len(problems)-1].Accepted = true
	}
	return problems
}
