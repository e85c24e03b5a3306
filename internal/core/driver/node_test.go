package driver

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

func TestCheckNode(t *testing.T) {
	long := strings.Repeat("x", 64)
	for _, test := range []struct {
		what     string
		id       string
		key      string
		value    string
		max      int64
		problems int // 0 or 1
		accepted bool
	}{
		{"all well", "n", "topology.example.com/zone", "eu-1.a_B", 0, 0, false},
		{"no prefix", "n", "zone", "", 16, 0, false},
		{"longest", strings.Repeat("n", 256), "a.b/" + long[:63], long[:63], math.MaxInt32, 0, false},
		{"empty id", "", "zone", "a", 0, 1, false},
		{"long id", strings.Repeat("n", 257), "zone", "a", 0, 1, false},
		{"long name", "n", "a/" + long, "a", 0, 1, false},
		{"empty name", "n", "a/", "a", 0, 1, false},
		{"empty prefix", "n", "/a", "a", 0, 1, false},
		{"upper case prefix", "n", "A.b/c", "a", 0, 1, false},
		{"two slashes", "n", "a/b/c", "a", 0, 1, false},
		{"prefix ends with a dash", "n", "a-.b/c", "a", 0, 1, false},
		{"long prefix", "n", strings.Repeat("a.", 127) + "/c", "a", 0, 1, false},
		{"space in key", "n", "zone a", "a", 0, 1, false},
		{"dash first", "n", "-zone", "a", 0, 1, false},
		{"long value", "n", "zone", long, 0, 1, false},
		{"colon in value", "n", "zone", "a:b", 0, 1, false},
		{"dot last", "n", "zone", "a.", 0, 1, false},
		{"negative limit", "n", "zone", "a", -1, 1, false},
		{"huge limit", "n", "zone", "a", math.MaxInt32 + 1, 1, true},
	} {
		found := CheckNode(&csi.NodeGetInfoResponse{NodeId: test.id, MaxVolumesPerNode: test.max,
			AccessibleTopology: &csi.Topology{Segments: map[string]string{test.key: test.value}}})
		if len(found) != test.problems || len(found) == 1 && found[0].Accepted != test.accepted {
			t.Errorf("%s: %+v", test.what, found)
		}
	}
	many := map[string]string{}
	for i := range maxTopology + 1 {
		many[fmt.Sprint("k", i)] = "not a label value!"
	}
	found := CheckNode(&csi.NodeGetInfoResponse{NodeId: "n", AccessibleTopology: &csi.Topology{Segments: many}})
	if len(found) != 1 || found[0].Field != Topology {
		t.Errorf("too many keys: %d problems", len(found))
	}
}
