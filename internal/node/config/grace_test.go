package config

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// graceTest follows what is in force while the files change.
type graceTest struct {
	t       *testing.T
	grace   Grace
	inForce *InForce
	start   time.Time
	atOnce  bool
	inUse   map[string]string // drivers that must stay, and why
}

func newGraceTest(t *testing.T) *graceTest {
	return &graceTest{t: t, grace: Grace{Period: GracePeriod}, inForce: &InForce{Config: Default()}, start: time.Now()}
}

// files reads these files and drivers at a time. The first file has root_dir, unless it is the
// default.
func (g *graceTest) files(at time.Duration, root string, files []string, drivers ...Driver) Kept {
	c := Default()
	c.Kubelet.RootDir = root
	c.Drivers = drivers
	r := &Result{Config: c, Files: files, origins: map[string]position{}}
	if root != Default().Kubelet.RootDir {
		r.origins["kubelet.root_dir"] = position{file: files[0]}
	}
	k := g.grace.Keep(g.inForce, r, g.start.Add(at), g.atOnce, func(name string) string { return g.inUse[name] })
	g.inForce = k.InForce
	return k
}

func (g *graceTest) want(k Kept, root string, next time.Duration, names ...string) {
	g.t.Helper()
	var got []string
	for _, d := range k.Config.Drivers {
		got = append(got, d.Name)
	}
	if !slices.Equal(got, names) || k.Config.Kubelet.RootDir != root {
		g.t.Errorf("in force: %q below %s, want %q below %s", got, k.Config.Kubelet.RootDir, names, root)
	}
	if at := g.start.Add(next); next == 0 && !k.Next.IsZero() || next != 0 && !k.Next.Equal(at) {
		g.t.Errorf("next in %s, want %s", k.Next.Sub(g.start), next)
	}
}

func TestDriverStaysForTheGracePeriod(t *testing.T) {
	g := newGraceTest(t)
	a, b, c := DefaultDriver("a", "/a"), DefaultDriver("b", "/b"), DefaultDriver("c", "/c")
	main := []string{"main"}
	g.want(g.files(0, "/k", main, a, c), "/k", 0, "a", "c")

	// Away and back, twice; the others change meanwhile.
	k := g.files(time.Second, "/k", main, b, c)
	g.want(k, "/k", 11*time.Second, "a", "b", "c")
	if !slices.Equal(k.Disappeared, []string{"a"}) {
		t.Errorf("disappeared: %q", k.Disappeared)
	}
	if k := g.files(5*time.Second, "/k", main, b, c); len(k.Disappeared) > 0 {
		t.Errorf("disappeared again: %q", k.Disappeared)
	}
	g.want(g.files(10*time.Second, "/k", main, a, b, c), "/k", 0, "a", "b", "c")
	g.want(g.files(20*time.Second, "/k", main, a), "/k", 30*time.Second, "a", "b", "c")
	g.want(g.files(29*time.Second, "/k", main, a), "/k", 30*time.Second, "a", "b", "c")
	g.want(g.files(30*time.Second, "/k", main, a), "/k", 0, "a")

	// A driver that is disabled or renamed did not disappear by accident.
	off := a
	off.Enabled = false
	if k := g.files(40*time.Second, "/k", main, off); k.Config.Drivers[0].Enabled {
		t.Error("kept though disabled")
	}
	g.want(g.files(50*time.Second, "/k", main), "/k", 0) // was disabled
	g.files(60*time.Second, "/k", main, a)
	renamed := DefaultDriver("z", "/a")
	g.want(g.files(61*time.Second, "/k", main, renamed), "/k", 0, "z")

	// A disabled table with its socket is not the renamed driver.
	renamed.Name, renamed.Enabled = "y", false
	g.want(g.files(62*time.Second, "/k", main, renamed), "/k", 72*time.Second, "y", "z")
}

// Without a grace period, tables that disappeared are no longer in force, except for drivers that
// must stay.
func TestNothingStaysForTheGracePeriodAtOnce(t *testing.T) {
	g := newGraceTest(t)
	a, b, c := DefaultDriver("a", "/a"), DefaultDriver("b", "/b"), DefaultDriver("c", "/c")
	const std = "/var/lib/kubelet"
	g.files(0, "/k", []string{"main"}, a, b, c)
	g.want(g.files(time.Second, "/k", []string{"main"}, b, c), "/k", 11*time.Second, "a", "b", "c")
	g.atOnce, g.inUse = true, map[string]string{"a": "2 volumes"}
	k := g.files(2*time.Second, std, nil, c)
	g.want(k, std, 12*time.Second, "a", "c")
	if len(k.Staying) != 1 || k.Staying[0].KeptFor != "2 volumes" {
		t.Errorf("staying: %+v", k.Staying)
	}
	g.atOnce = false
	g.want(g.files(11*time.Second, std, nil, c), std, 12*time.Second, "a", "c")
	g.inUse = nil
	g.want(g.files(12*time.Second, std, nil, c), std, 0, "c")
}

func TestRootDirStaysForTheGracePeriod(t *testing.T) {
	g := newGraceTest(t)
	a := DefaultDriver("a", "/a")
	const std = "/var/lib/kubelet"
	g.want(g.files(0, "/k", []string{"main", "a"}, a), "/k", 0, "a")

	// The file is away, and comes back.
	k := g.files(time.Second, std, []string{"a"}, a)
	g.want(k, "/k", 11*time.Second, "a")
	if !k.RootDir {
		t.Error("not reported")
	}
	k = g.files(5*time.Second, std, []string{"a"}, a)
	g.want(k, "/k", 11*time.Second, "a")
	if k.RootDir {
		t.Error("reported again")
	}
	g.want(g.files(6*time.Second, "/k", []string{"main", "a"}, a), "/k", 0, "a")

	// Another process goes on, and finds another file with another root_dir in its place.
	g.grace = Grace{Period: GracePeriod}
	g.want(g.files(7*time.Second, "/l", []string{"hidden until now", "a"}, a), "/k", 17*time.Second, "a")

	// It stays away.
	g.want(g.files(17*time.Second, std, []string{"a"}, a), std, 0, "a")

	// An edit is no accident, whatever other file disappears with it.
	g.want(g.files(20*time.Second, "/k", []string{"main", "a"}, a), "/k", 0, "a")
	g.want(g.files(21*time.Second, "/l", []string{"main"}, a), "/l", 0, "a")
	g.want(g.files(22*time.Second, std, []string{"main"}, a), std, 0, "a")
}

// A driver stays beyond the grace period while it must, also in another process, and goes with
// the next period when it need not any more.
func TestDriverStaysWhileItMust(t *testing.T) {
	g := newGraceTest(t)
	a, b := DefaultDriver("a", "/a"), DefaultDriver("b", "/b")
	main := []string{"main"}
	g.files(0, "/k", main, a, b)
	g.inUse = map[string]string{"a": "2 volumes"}
	g.want(g.files(time.Second, "/k", main), "/k", 11*time.Second, "a", "b")
	staying := func(k Kept, want string) {
		t.Helper()
		var got string
		for _, d := range k.Staying {
			got += d.Name + ": " + d.KeptFor
		}
		if got != want {
			t.Errorf("staying since then: %q, want %q", got, want)
		}
	}
	why := func(want string) {
		t.Helper()
		if d, _ := g.inForce.Driver("a"); d.KeptFor != want {
			t.Errorf("kept for %q, want %q", d.KeptFor, want)
		}
	}
	why("")
	k := g.files(11*time.Second, "/k", main)
	g.want(k, "/k", 21*time.Second, "a")
	staying(k, "a: 2 volumes")
	why("2 volumes")

	// The files change meanwhile: nothing is asked again, and nothing is forgotten.
	g.inUse = map[string]string{"a": "1 volume"}
	k = g.files(15*time.Second, "/k", main, b)
	g.want(k, "/k", 21*time.Second, "a", "b")
	why("2 volumes")
	k = g.files(21*time.Second, "/k", main, b)
	g.want(k, "/k", 31*time.Second, "a", "b")
	staying(k, "")
	why("1 volume")

	// Another process goes on, with what was saved.
	path := t.TempDir() + "/last-good.json"
	if err := SaveLastGood(path, g.inForce); err != nil {
		t.Fatal(err)
	}
	saved, err := LoadLastGood(path)
	if err != nil || !saved.Equal(g.inForce) {
		t.Fatalf("%+v (%v), want %+v", saved, err, g.inForce)
	}
	g.inForce, g.grace = saved, Grace{Period: GracePeriod}
	g.want(g.files(25*time.Second, "/k", main, b), "/k", 35*time.Second, "a", "b")
	why("1 volume")
	g.want(g.files(35*time.Second, "/k", main, b), "/k", 45*time.Second, "a", "b")

	// Its table is back, and gone again; then nothing keeps it.
	g.want(g.files(40*time.Second, "/k", main, a, b), "/k", 0, "a", "b")
	why("")
	g.files(41*time.Second, "/k", main, b)
	g.want(g.files(51*time.Second, "/k", main, b), "/k", 61*time.Second, "a", "b")
	g.inUse = nil
	g.want(g.files(60*time.Second, "/k", main, b), "/k", 61*time.Second, "a", "b")
	g.want(g.files(61*time.Second, "/k", main, b), "/k", 0, "b")

	// Settings in the files take effect at once, even if volumes are in use.
	g.files(70*time.Second, "/k", main, a)
	g.inUse = map[string]string{"a": "2 volumes"}
	g.files(71*time.Second, "/k", main)
	g.files(81*time.Second, "/k", main)
	why("2 volumes")
	off := a
	off.Enabled = false
	if k := g.files(82*time.Second, "/k", main, off); k.Config.Drivers[0].Enabled || k.Config.Drivers[0].KeptFor != "" {
		t.Errorf("kept though disabled: %+v", k.Config.Drivers)
	}
}

// An error in the files ends nothing that is in force.
func TestOver(t *testing.T) {
	inForce := one("[kubelet]\nroot_dir = \"/k\"\n[driver.a]\nsocket = \"/a\"\n[driver.b]\nsocket = \"/b\"\n").InForce()
	for _, c := range []struct{ text, root, drivers string }{
		{"broken", "/k", "a b"},
		{"[kubelet]\nroot_dir = 1\n[driver.c]\nsocket = \"/c\"\n", "/k", "a b"},
		{"[driver.a]\nsocket = 1\n[driver.c]\nsocket = \"/c\"\n", "/k", "a b c"},
		{"[kubelet]\nroot_dir = \"/l\"\n[driver.a]\nsocket = \"/a\"\nenabled = false\n[log]\nlevel = 1\n", "/k", "a b"},
		{"[driver.renamed]\nsocket = \"/b\"\n[log]\nlevel = 1\n", "/k", "a renamed"},
	} {
		r := one(c.text)
		if len(r.Errors) == 0 {
			t.Fatalf("%q has no error", c.text)
		}
		got := r.Over(inForce)
		var names []string
		for _, d := range got.Drivers {
			names = append(names, d.Name)
		}
		if strings.Join(names, " ") != c.drivers || got.Kubelet.RootDir != c.root || got.RootDirFile != "f" {
			t.Errorf("%q: drivers %q, root_dir %s of %q", c.text, names, got.Kubelet.RootDir, got.RootDirFile)
		}
	}
	if a, _ := inForce.Driver("a"); len(inForce.Drivers) != 2 || !a.Enabled {
		t.Errorf("the configuration in force was changed: %+v", inForce.Drivers)
	}
}
