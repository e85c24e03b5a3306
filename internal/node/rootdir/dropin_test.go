package rootdir

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// The drop-in hides below another root directory what the unit hides below the default.
func TestDropInHidesWhatTheUnitHides(t *testing.T) {
	unit, err := os.ReadFile("../../../systemd/csi-registrar.service")
	if err != nil {
		t.Fatal(err)
	}
	masks := func(text, root string) (names []string) {
		for line := range strings.Lines(text) {
			paths, ok := strings.CutPrefix(line, "InaccessiblePaths=")
			for _, p := range strings.Fields(paths) {
				if name, below := strings.CutPrefix(p, "-"+root+"/"); ok && below {
					names = append(names, name)
				}
			}
		}
		slices.Sort(names)
		return names
	}
	want, got := masks(string(unit), defaultKubeletDir), masks(DropIn("/data/kubelet"), "/data/kubelet")
	if len(want) < 3 || !slices.Equal(got, want) {
		t.Errorf("the drop-in hides %q, the unit %q", got, want)
	}
}
