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
	if len(news) == 0 && movedTopology(old.Identity, now.Identity) != "" {
		return ""
	}
	compare("node id", old.Identity.NodeID, now.Identity.NodeID)
	if o, n := old.Identity.MaxVolumes, now.Identity.MaxVolumes; o != n {
		news = append(news, fmt.Sprintf("volume limit was %d, is %d", o, n))
	}
	if added := addedTopology(old.Identity, now.Identity); added != "" {
		news = append(news, "topology keys added: "+added)
	}
	return strings.Join(news, "; ")
}

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
