package driver

import (
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

const maxVersion = 128 // characters of a vendor version; longer ones are cut

// validateInfo compares GetPluginInfo's answer with the configuration. An empty name is
// Starting: some drivers answer before they know who they are.
func validateInfo(cfg config.Connection, info *csi.GetPluginInfoResponse, id *status.Identity) finding {
	name := info.GetName()
	id.Version = safetext.Clean(info.GetVendorVersion(), maxVersion)
	reports := fmt.Sprintf("the driver at %s reports name %s", cfg.Socket, quote(name, csiname.MaxName+1))
	switch {
	case name == "":
		return finding{status.Starting, "the driver answers GetPluginInfo with an empty name: see its own log and flags"}
	case cfg.Name != "" && name != cfg.Name:
		return finding{status.Mismatch, fmt.Sprintf("%s, expected %q: csi-registrar doctor %s names the fix", reports, cfg.Name, cfg.Name)}
	}
	if err := csiname.CheckName(name); err != nil {
		return finding{status.Mismatch, fmt.Sprintf("%s: %s", reports, safetext.Clean(err.Error(), maxMessageShown))}
	}
	id.Name = name
	return finding{}
}

// validateNode records NodeGetInfo's answer. A driver whose answer the kubelet or the API server
// would refuse is Starting: it may give another answer soon.
func validateNode(info *csi.NodeGetInfoResponse, id *status.Identity) finding {
	for _, p := range CheckNode(info) {
		if !p.Accepted {
			return finding{status.Starting, fmt.Sprintf("the driver answers NodeGetInfo, but %s (expected: %s): see its own flags and log", p.Found, p.Expected)}
		}
	}
	id.NodeID, id.MaxVolumes, id.Topology = info.GetNodeId(), info.GetMaxVolumesPerNode(), maps.Clone(info.GetAccessibleTopology().GetSegments())
	return finding{}
}

// quote quotes a string of the driver, of which it keeps at most limit characters.
func quote(s string, limit int) string {
	if short := fmt.Sprintf("%.*s", limit, s); short != s {
		s = short + "…"
	}
	return safetext.Quote(s)
}
