package doctor

import (
	"math"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

func TestNodeRules(t *testing.T) {
	info := &csi.NodeGetInfoResponse{MaxVolumesPerNode: math.MaxInt32 + 1,
		AccessibleTopology: &csi.Topology{Segments: map[string]string{"zone": "a:b"}}}
	found := nodeRules(info)
	if len(found) != 3 || found[0].ID != NodeIDInvalid || found[0].Severity != Problem || found[1].ID != TopologyInvalid ||
		found[2].ID != VolumeLimitInvalid || found[2].Severity != Warning {
		t.Errorf("%+v", found)
	}
}
