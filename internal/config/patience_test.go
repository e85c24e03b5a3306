package config

import (
	"slices"
	"testing"
	"time"
)

// patient follows what is in force while the files change.
type patient struct {
	t       *testing.T
	p       Patience
	inForce *Config
	start   time.Time
}

func (p *patient) files(at time.Duration, root string, files []string, drivers ...Driver) Kept {
	c := Default()
	c.Kubelet.RootDir = root
	c.Drivers = drivers
	k := p.p.Keep(p.inForce, &Result{Config: c, Files: files}, p.start.Add(at))
	p.inForce = k.Config
	return k
}

func (p *patient) want(k Kept, root string, next time.Duration, names ...string) {
	p.t.Helper()
	var got []string
	for _, d := range k.Config.Drivers {
		got = append(got, d.Name)
	}
	if !slices.Equal(got, names) || k.Config.Kubelet.RootDir != root {
		p.t.Errorf("in force: %q below %s, want %q below %s", got, k.Config.Kubelet.RootDir, names, root)
	}
	if at := p.start.Add(next); next == 0 && !k.Next.IsZero() || next != 0 && !k.Next.Equal(at) {
		p.t.Errorf("next in %s, want %s", k.Next.Sub(p.start), next)
	}
}

func TestPatience(t *testing.T) {
	p := &patient{t: t, inForce: Default(), start: time.Now()}
	a, b, c := DefaultDriver("a", "/a"), DefaultDriver("b", "/b"), DefaultDriver("c", "/c")
	main := []string{"main"}
	p.want(p.files(0, "/k", main, a, c), "/k", 0, "a", "c")

	// Away and back, twice; the others change meanwhile.
	k := p.files(time.Second, "/k", main, b, c)
	p.want(k, "/k", 11*time.Second, "a", "b", "c")
	if !slices.Equal(k.Vanished, []string{"a"}) {
		t.Errorf("vanished: %q", k.Vanished)
	}
	if k := p.files(5*time.Second, "/k", main, b, c); len(k.Vanished) > 0 {
		t.Errorf("vanished again: %q", k.Vanished)
	}
	p.want(p.files(10*time.Second, "/k", main, a, b, c), "/k", 0, "a", "b", "c")
	p.want(p.files(20*time.Second, "/k", main, a), "/k", 30*time.Second, "a", "b", "c")
	p.want(p.files(29*time.Second, "/k", main, a), "/k", 30*time.Second, "a", "b", "c")
	p.want(p.files(30*time.Second, "/k", main, a), "/k", 0, "a")

	// What is still said is no accident: disabled, and renamed.
	off := a
	off.Enabled = false
	if k := p.files(40*time.Second, "/k", main, off); k.Config.Drivers[0].Enabled {
		t.Error("kept though disabled")
	}
	p.want(p.files(50*time.Second, "/k", main), "/k", 0) // was disabled
	p.files(60*time.Second, "/k", main, a)
	renamed := DefaultDriver("z", "/a")
	p.want(p.files(61*time.Second, "/k", main, renamed), "/k", 0, "z")
}

func TestPatienceWithRootDir(t *testing.T) {
	p := &patient{t: t, inForce: Default(), start: time.Now()}
	a := DefaultDriver("a", "/a")
	const std = "/var/lib/kubelet"
	p.want(p.files(0, "/k", []string{"main", "a"}, a), "/k", 0, "a")

	// The file is away, and comes back.
	k := p.files(time.Second, std, []string{"a"}, a)
	p.want(k, "/k", 11*time.Second, "a")
	if !k.Kubelet {
		t.Error("not told")
	}
	k = p.files(5*time.Second, std, []string{"a"}, a)
	p.want(k, "/k", 11*time.Second, "a")
	if k.Kubelet {
		t.Error("told again")
	}
	p.want(p.files(6*time.Second, "/k", []string{"main", "a"}, a), "/k", 0, "a")

	// It stays away.
	p.want(p.files(20*time.Second, std, []string{"a"}, a), "/k", 30*time.Second, "a")
	p.want(p.files(30*time.Second, std, []string{"a"}, a), std, 0, "a")

	// The first to vanish after a reload.
	both := Default()
	both.Kubelet.RootDir, both.Drivers = "/k", []Driver{a}
	r := &Result{Config: both, Files: []string{"main", "a"}}
	p.p.Begin(r)
	p.inForce = both
	p.want(p.files(31*time.Second, std, []string{"a"}, a), "/k", 41*time.Second, "a")
	p.p.Begin(&Result{Config: Default(), Files: []string{"a"}})

	// An edit is no accident.
	p.want(p.files(40*time.Second, "/l", []string{"a"}, a), "/l", 0, "a")
}
