package csiname

import "testing"

// TestFirstAndLastOfAName checks that each letter and digit can begin and end a name, and that the
// characters beside them in ASCII cannot.
func TestFirstAndLastOfAName(t *testing.T) {
	for _, c := range []string{"a", "z", "A", "Z", "0", "9"} {
		for _, err := range []error{CheckName(c + ".example" + c), CheckLabelValue(c + "-" + c)} {
			if err != nil {
				t.Errorf("%q: %v", c, err)
			}
		}
	}
	for _, c := range []string{"`", "{", "@", "[", "/", ":", "-", "."} {
		for _, name := range []string{c + "x", "x" + c} {
			if CheckName(name) == nil || CheckLabelValue(name) == nil {
				t.Errorf("%q is accepted", name)
			}
		}
	}
}
