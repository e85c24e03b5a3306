package config

import (
	"strings"
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

// TestRenamedDriverMustStay checks that the new table of a renamed driver is an error while the old
// one must stay: which, where, why, and what to do. The old one stays also where only the valid
// part of the files takes effect.
func TestRenamedDriverMustStay(t *testing.T) {
	inForce := one("[driver.\"a.x\"]\nsocket = \"/a\"\nendpoint = \"/ea\"\n[driver.b]\nsocket = \"/b\"\n[driver.off]\nsocket = \"/off\"\nenabled = false\n").InForce()
	why := map[string]string{"a.x": "1 volume", "off": "2 volumes"}
	for name, c := range map[string]struct{ text, rejected, over string }{
		"renamed":         {"[driver.c]\nsocket = \"/a\"\n[driver.b]\nsocket = \"/b\"\n", "c", "a.x b off"},
		"by its endpoint": {"[driver.c]\nsocket = \"/c\"\nendpoint = \"/ea\"\n", "c", "a.x b off"},
		"replaced":        {"[driver.b]\nsocket = \"/a\"\n", "b", "a.x b off"},
		"beside an error": {"[driver.c]\nsocket = \"/a\"\n[log]\nlevel = 1\n", "c", "a.x b off"},
		"without volumes": {"[driver.c]\nsocket = \"/b\"\n", "", "a.x c off"},
		"disabled":        {"[driver.\"a.x\"]\nsocket = \"/a\"\nenabled = false\n[driver.c]\nsocket = \"/a\"\n", "", "a.x b c off"},
		"was disabled":    {"[driver.c]\nsocket = \"/off\"\n", "", "a.x b c"},
		"new is disabled": {"[driver.c]\nsocket = \"/a\"\nenabled = false\n", "", "a.x b c off"},
		"disappeared":     {"", "", "a.x b off"},
	} {
		t.Run(name, func(t *testing.T) {
			r := one(c.text)
			before := len(r.Errors)
			rejected := r.RejectRenamed(inForce, func(name string) string { return why[name] })
			got, want := r.Errors[before:].Error(), ""
			if c.rejected != "" {
				want = `f:2: driver."` + c.rejected + `".socket: replaces that of a.x, which stays registered: 1 volume (write [driver."a.x"] until then)`
			}
			if rejected != (want != "") || got != want {
				t.Errorf("rejected %t: %s\nwant %s", rejected, got, want)
			}
			var names []string
			for _, d := range r.Over(inForce).Drivers {
				names = append(names, d.Name)
			}
			if strings.Join(names, " ") != c.over {
				t.Errorf("in force: %q, want %q", names, c.over)
			}
			if tables, files := r.LeftOut(); rejected != (len(tables) == 1) || len(files) > 0 {
				t.Errorf("left out: %v, files %q", tables, files)
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
