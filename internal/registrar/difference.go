package registrar

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"csi-registrar/internal/status"
)

// difference returns what the kubelet must and can learn, as old and new; empty if nothing.
// What it is told itself (endpoint, versions) always counts. What it would ask the driver
// counts unless a topology value changed: then it would refuse (kubelet v1.36), because
// the Node has the old label, and a working registration would be lost.
func difference(old, now status.Announcement) string {
	var news []string
	compare := func(what, o, n string) {
		if o != n {
			news = append(news, fmt.Sprintf("%s was %q, is %q", what, o, n))
		}
	}
	compare("endpoint", old.Endpoint, now.Endpoint)
	compare("supported versions", strings.Join(old.Versions, ","), strings.Join(now.Versions, ","))
	moved, added := topologyNews(old.Identity.Topology, now.Identity.Topology)
	if len(news) == 0 && len(moved) > 0 {
		return ""
	}
	compare("node id", old.Identity.NodeID, now.Identity.NodeID)
	if o, n := old.Identity.MaxVolumes, now.Identity.MaxVolumes; o != n {
		news = append(news, fmt.Sprintf("volume limit was %d, is %d", o, n))
	}
	if len(added) > 0 {
		news = append(news, "topology keys added: "+strings.Join(added, ", "))
	}
	return strings.Join(news, "; ")
}

// topologyNews names the topology keys whose value is another than the kubelet was told, and those
// that it was not told.
func topologyNews(old, now map[string]string) (moved, added []string) {
	for _, k := range slices.Sorted(maps.Keys(now)) {
		if was, told := old[k]; !told {
			added = append(added, k)
		} else if was != now[k] {
			moved = append(moved, fmt.Sprintf("%s=%q was %q", k, now[k], was))
		}
	}
	return moved, added
}
