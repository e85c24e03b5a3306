package doctor

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/driver"
)

// nodeRules returns a Finding for each rule that the driver's answer to NodeGetInfo breaks.
func nodeRules(info *csi.NodeGetInfoResponse) (found []Finding) {
	ids := map[driver.NodeField]ID{driver.NodeID: NodeIDInvalid, driver.Topology: TopologyInvalid, driver.VolumeLimit: VolumeLimitInvalid}
	for _, p := range driver.CheckNode(info) {
		f := Finding{ID: ids[p.Field], Severity: Problem, Found: p.Found, Expected: p.Expected}
		if p.Accepted {
			f.Severity = Warning
		}
		found = append(found, f)
	}
	return found
}
