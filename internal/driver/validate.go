package driver

import (
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// What the API server takes: a CSINode's node id (kubelet v1.36, validation of
// storage/v1), and topology as the key and the value of a node's label.
const (
	maxNodeID   = 256 // bytes
	maxTopology = 128 // entries; no node has a tenth of it
	maxVersion  = 128 // characters; longer ones are cut
	maxKeyShown = 80  // characters of a topology key, so that a reason is not filled by it
)

// validateInfo checks GetPluginInfo's answer against what is configured. An empty name is
// Starting: some drivers answer before they know who they are.
func validateInfo(cfg Config, info *csi.GetPluginInfoResponse, id *status.Identity) finding {
	name := info.GetName()
	id.Version = safetext.Clean(info.GetVendorVersion(), maxVersion)
	shown := safetext.Clean(name, status.MaxName+1)
	reports := fmt.Sprintf("the driver at %s reports name %s", cfg.Socket, quote(name, status.MaxName+1))
	switch {
	case name == "":
		return finding{status.Starting, "the driver answers GetPluginInfo with an empty name: see its own log and flags"}
	case cfg.Name != "" && name != cfg.Name:
		id.Name = shown
		return finding{status.Mismatch, fmt.Sprintf("%s, expected %q; fix the table name or the socket", reports, cfg.Name)}
	}
	if err := status.CheckName(name); err != nil {
		id.Name = shown
		return finding{status.Mismatch, fmt.Sprintf("%s: %s", reports, safetext.Clean(err.Error(), maxMessageShown))}
	}
	id.Name = name
	return finding{}
}

// validateNode checks NodeGetInfo's answer against what the kubelet and the API server take.
// What they would refuse is Starting: the driver answers, and may answer better soon.
func validateNode(info *csi.NodeGetInfoResponse, id *status.Identity) finding {
	node, topology := info.GetNodeId(), info.GetAccessibleTopology().GetSegments()
	switch {
	case node == "":
		return wrongNode("its node id is empty; the kubelet needs one")
	case len(node) > maxNodeID:
		return wrongNode(fmt.Sprintf("its node id has %d bytes; at most %d are allowed", len(node), maxNodeID))
	case info.GetMaxVolumesPerNode() < 0:
		return wrongNode(fmt.Sprintf("its volume limit is %d; it cannot be negative", info.GetMaxVolumesPerNode()))
	case len(topology) > maxTopology:
		return wrongNode(fmt.Sprintf("its topology has %d keys; at most %d are taken", len(topology), maxTopology))
	}
	for _, k := range slices.Sorted(maps.Keys(topology)) {
		if err := status.CheckLabelKey(k); err != nil {
			return wrongNode(fmt.Sprintf("its topology key %s is no label key: %v", quote(k, maxKeyShown), err))
		}
		if err := status.CheckLabelValue(topology[k]); err != nil {
			return wrongNode(fmt.Sprintf("its topology value of %s is no label value: %v", quote(k, maxKeyShown), err))
		}
	}
	id.NodeID, id.MaxVolumes, id.Topology = node, info.GetMaxVolumesPerNode(), maps.Clone(topology)
	return finding{}
}

func wrongNode(why string) finding {
	return finding{status.Starting, "the driver answers NodeGetInfo, but " + why + ": see its own flags and log"}
}

// quote marks the driver's own words as such, at most so many characters of them.
func quote(s string, most int) string {
	if short := fmt.Sprintf("%.*s", most, s); short != s {
		s = short + "…"
	}
	return safetext.Quote(s)
}
