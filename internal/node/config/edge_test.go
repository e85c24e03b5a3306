package config

import (
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/sys/unixsock"
)

// TestStayingDriverIsLookedAtAgain checks that a driver that stays because of its volumes is looked
// at after each grace period, although nothing else happens.
func TestStayingDriverIsLookedAtAgain(t *testing.T) {
	g := newGraceTest(t)
	main := []string{"main"}
	g.files(0, "/k", main, DefaultDriver("a", "/a"))
	g.inUse = map[string]string{"a": "1 volume in use"}
	g.want(g.files(time.Second, "/k", main), "/k", 11*time.Second, "a")
	g.want(g.files(11*time.Second, "/k", main), "/k", 21*time.Second, "a")
	g.want(g.files(21*time.Second, "/k", main), "/k", 31*time.Second, "a")
	g.inUse = nil
	g.want(g.files(31*time.Second, "/k", main), "/k", 0)
}

// TestErrorInKubeletStays checks that a valid value in a later file does not hide an error in
// [kubelet], which leaves out all drivers.
func TestErrorInKubeletStays(t *testing.T) {
	l := newLoader()
	l.apply("a", "[kubelet]\nroot_dir = \"k\"\n"+goodTable)
	l.apply("b", "[kubelet]\nroot_dir = \"/k\"\n")
	if r := l.result(); len(r.Errors) != 1 || len(r.Config.Drivers) != 0 || len(r.Faulty) != 1 {
		t.Errorf("%v, drivers %v, faulty %v", r.Errors, r.Config.Drivers, r.Faulty)
	}
}

// TestLongestValues checks that what is as long as it may be is accepted, and nothing longer.
func TestLongestValues(t *testing.T) {
	for what, text := range map[string]func(n int) string{
		"a path": func(n int) string {
			return "[driver.good]\nsocket = \"/" + strings.Repeat("x", unixsock.MaxPath-1+n) + "\"\n"
		},
		"a line": func(n int) string { return goodTable + "#" + strings.Repeat("x", maxLine-2+n) + "\n" },
	} {
		if r := one(text(0)); len(r.Errors) > 0 || len(r.Config.Drivers) != 1 {
			t.Errorf("%s: %v", what, r.Errors)
		}
		if r := one(text(1)); len(r.Errors) != 1 {
			t.Errorf("%s that is too long: %v", what, r.Errors)
		}
	}
}

// TestKeepLeavesTheResult checks that what is kept is not added to the files' configuration, which
// others read afterwards.
func TestKeepLeavesTheResult(t *testing.T) {
	g := newGraceTest(t)
	g.files(0, "/k", []string{"main"}, DefaultDriver("a", "/a"), DefaultDriver("b", "/b"))
	r := &Result{Config: Default(), Files: []string{"main"}, origins: map[string]position{}}
	r.Config.Drivers = append(make([]Driver, 0, 8), DefaultDriver("b", "/b"))
	k := g.grace.Keep(g.inForce, r, g.start, false, nil)
	if len(k.Drivers) != 2 || len(r.Config.Drivers) != 1 || r.Config.Drivers[0].Name != "b" {
		t.Errorf("in force %v, in the files %v", k.Drivers, r.Config.Drivers)
	}
}
