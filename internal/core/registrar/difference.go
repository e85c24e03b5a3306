package registrar

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// difference describes what the kubelet must be told with a new registration; empty if nothing. A
// changed endpoint or version always counts. The values that the kubelet asks the driver for count
// unless a topology value changed: the kubelet would refuse it (v1.36) because the Node has the old
// label, and a working registration would be lost. It would not if it has learned the new value by
// itself. With config.Leave a changed limit alone does not
// count: the kubelet asks the driver for it periodically. The API server would refuse such an
// update with another node ID or topology key, so these still count (v1.37).
func difference(old, now status.Announcement, limit config.WhenLimitChanges, learned bool) string {
	var changes []string
	compare := func(what, o, n string) {
		if o != n {
			changes = append(changes, fmt.Sprintf("%s was %q, is %q", what, o, n))
		}
	}
	compare("endpoint", old.Endpoint, now.Endpoint)
	compare("supported versions", strings.Join(old.Versions, ","), strings.Join(now.Versions, ","))
	moved, added := topologyChanges(old.Identity.Topology, now.Identity.Topology)
	if len(moved) > 0 && learned {
		changes = append(changes, "the kubelet has accepted "+strings.Join(moved, ", "))
	} else if len(changes) == 0 && len(moved) > 0 {
		return ""
	}
	compare("node id", old.Identity.NodeID, now.Identity.NodeID)
	if o, n := old.Identity.MaxVolumes, now.Identity.MaxVolumes; o != n && limit != config.Leave {
		changes = append(changes, fmt.Sprintf("volume limit was %d, is %d", o, n))
	}
	if len(added) > 0 {
		changes = append(changes, "topology keys added: "+strings.Join(added, ", "))
	}
	return strings.Join(changes, "; ")
}

// topologyChanges returns the topology keys whose value differs from the announced one, and the
// keys that were not announced.
func topologyChanges(old, now map[string]string) (moved, added []string) {
	if maps.Equal(old, now) { // nearly always
		return nil, nil
	}
	for _, k := range slices.Sorted(maps.Keys(now)) {
		if was, ok := old[k]; !ok {
			added = append(added, k)
		} else if was != now[k] {
			moved = append(moved, fmt.Sprintf("%s=%q was %q", k, now[k], was))
		}
	}
	return moved, added
}

// refusedChange describes a changed topology value, and with it a changed node ID, that the kubelet
// would refuse as long as the Node has the old label; empty: there is none.
func refusedChange(old, now status.Identity) string {
	moved, _ := topologyChanges(old.Topology, now.Topology)
	if len(moved) == 0 {
		return ""
	}
	text := "the driver's topology changed (" + strings.Join(moved, ", ") + ")"
	if old.NodeID != now.NodeID {
		text += fmt.Sprintf(" and its node id (%q was %q)", now.NodeID, old.NodeID)
	}
	return text + ": the kubelet would refuse it while the Node has the old label"
}
