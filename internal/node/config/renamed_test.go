package config

import (
	"testing"
	"time"
)

// TestRenamedDriverGoesAtOnce checks that a driver whose socket now belongs to another table goes
// without a grace period, unless that table is disabled: then nobody took its place.
func TestRenamedDriverGoesAtOnce(t *testing.T) {
	for name, enabled := range map[string]bool{"enabled": true, "disabled": false} {
		t.Run(name, func(t *testing.T) {
			g := newGraceTest(t)
			main := []string{"main"}
			g.files(0, "/k", main, DefaultDriver("old", "/s"))
			renamed := DefaultDriver("new", "/s")
			renamed.Enabled = enabled
			k := g.files(time.Second, "/k", main, renamed)
			if enabled {
				g.want(k, "/k", 0, "new")
			} else {
				g.want(k, "/k", 11*time.Second, "new", "old")
			}
		})
	}
}

// TestGracePeriodsOfSeveral checks that each driver has its own grace period, and that the next
// time is the first of their ends, whichever of the drivers it is.
func TestGracePeriodsOfSeveral(t *testing.T) {
	g := newGraceTest(t)
	main := []string{"main"}
	a, b := DefaultDriver("a", "/a"), DefaultDriver("b", "/b")
	g.files(0, "/k", main, a, b)
	g.want(g.files(time.Second, "/k", main, a), "/k", 11*time.Second, "a", "b") // b is gone
	g.want(g.files(5*time.Second, "/k", main), "/k", 11*time.Second, "a", "b")  // and a
	g.want(g.files(11*time.Second, "/k", main), "/k", 15*time.Second, "a")
	g.want(g.files(15*time.Second, "/k", main), "/k", 0)
}
