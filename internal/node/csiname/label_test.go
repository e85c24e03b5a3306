package csiname

import (
	"strings"
	"testing"
)

func TestCheckLabel(t *testing.T) {
	long := strings.Repeat("x", 64)
	for key, good := range map[string]bool{
		"topology.example.com/zone":       true,
		"zone":                            true,
		"a.b/" + long[:63]:                true,
		strings.Repeat("a.", 126) + "a/c": true,
		strings.Repeat("a.", 127) + "a/c": false,
		"":                                false,
		"a/" + long:                       false,
		"a/":                              false,
		"/a":                              false,
		"A.b/c":                           false,
		"a/b/c":                           false,
		"a-.b/c":                          false,
		"a..b/c":                          false,
		"zone a":                          false,
		"-zone":                           false,
		"zone\n":                          false,
		"\u202ezone":                      false,
	} {
		if err := CheckLabelKey(key); (err == nil) != good {
			t.Errorf("key %q: %v", key, err)
		}
	}
	for value, good := range map[string]bool{
		"": true, "eu-1.a_B": true, long[:63]: true,
		long: false, "a:b": false, "a.": false, "_a": false, "a\x00": false, "ü": false,
	} {
		if err := CheckLabelValue(value); (err == nil) != good {
			t.Errorf("value %q: %v", value, err)
		}
	}
}
