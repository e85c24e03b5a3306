package safetext

import (
	"strings"
	"testing"
)

// TestLongestUnitName checks that the name of a unit has at most 255 bytes (systemd.unit(5)).
func TestLongestUnitName(t *testing.T) {
	name := strings.Repeat("x", 255-len(".service")) + ".service"
	if !UnitName(name) || UnitName("x"+name) {
		t.Errorf("%d bytes: %v, one more: %v", len(name), UnitName(name), UnitName("x"+name))
	}
}

// TestLongestWord checks that a word of 1,000 characters is shown without quotes, and a longer one
// is cut.
func TestLongestWord(t *testing.T) {
	word := strings.Repeat("x", 1000)
	if Word(word) != word {
		t.Error("1,000 characters are quoted")
	}
	if got := Word(word + "x"); len([]rune(got)) != 1002 || !strings.HasSuffix(got, "…\"") {
		t.Errorf("%d characters, the end is %q", len([]rune(got)), got[len(got)-10:])
	}
}
