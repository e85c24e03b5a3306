package registrar

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/status"
)

// movedTopology names the topology keys whose value is another than the kubelet was told.
func movedTopology(old, now status.Identity) string {
	var moved []string
	for _, k := range slices.Sorted(maps.Keys(old.Topology)) {
		if v, there := now.Topology[k]; there && v != old.Topology[k] {
			moved = append(moved, fmt.Sprintf("%s=%q was %q", k, v, old.Topology[k]))
		}
	}
	return strings.Join(moved, ", ")
}

// addedTopology names the topology keys that the kubelet was not told.
func addedTopology(old, now status.Identity) string {
	var added []string
	for _, k := range slices.Sorted(maps.Keys(now.Topology)) {
		if _, there := old.Topology[k]; !there {
			added = append(added, k)
		}
	}
	return strings.Join(added, ", ")
}
