package doctor

import (
	"math"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

func TestNodeRules(t *testing.T) {
	long := strings.Repeat("x", 64)
	for _, test := range []struct {
		what     string
		id       string
		key      string
		value    string
		max      int64
		severity Severity // of the one finding; empty: none
	}{
		{"all well", "n", "topology.example.com/zone", "eu-1.a_B", 0, ""},
		{"no prefix", "n", "zone", "", 16, ""},
		{"longest", strings.Repeat("n", 256), "a.b/" + long[:63], long[:63], math.MaxInt32, ""},
		{"empty id", "", "zone", "a", 0, Problem},
		{"long id", strings.Repeat("n", 257), "zone", "a", 0, Problem},
		{"long name", "n", "a/" + long, "a", 0, Problem},
		{"empty name", "n", "a/", "a", 0, Problem},
		{"empty prefix", "n", "/a", "a", 0, Problem},
		{"upper case prefix", "n", "A.b/c", "a", 0, Problem},
		{"two slashes", "n", "a/b/c", "a", 0, Problem},
		{"prefix ends with a dash", "n", "a-.b/c", "a", 0, Problem},
		{"long prefix", "n", strings.Repeat("a.", 127) + "/c", "a", 0, Problem},
		{"space in key", "n", "zone a", "a", 0, Problem},
		{"dash first", "n", "-zone", "a", 0, Problem},
		{"long value", "n", "zone", long, 0, Problem},
		{"colon in value", "n", "zone", "a:b", 0, Problem},
		{"dot last", "n", "zone", "a.", 0, Problem},
		{"negative limit", "n", "zone", "a", -1, Problem},
		{"huge limit", "n", "zone", "a", math.MaxInt32 + 1, Warning},
	} {
		found := nodeRules(&csi.NodeGetInfoResponse{NodeId: test.id, MaxVolumesPerNode: test.max,
			AccessibleTopology: &csi.Topology{Segments: map[string]string{test.key: test.value}}})
		switch {
		case test.severity == "" && len(found) != 0:
			t.Errorf("%s: %+v", test.what, found)
		case test.severity != "" && (len(found) != 1 || found[0].Severity != test.severity || found[0].ID == ""):
			t.Errorf("%s: %+v, want one %s", test.what, found, test.severity)
		}
	}
}
