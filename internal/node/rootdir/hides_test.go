package rootdir

import "testing"

// TestHides checks each value of ProtectHome= and PrivateTmp=.
func TestHides(t *testing.T) {
	for value, want := range map[string]bool{"": false, "no": false, "read-only": false, "yes": true, "tmpfs": true, "disconnected": true} {
		if Hides(value) != want {
			t.Errorf("%q: %v", value, !want)
		}
	}
}
