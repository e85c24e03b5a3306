package daemon

import (
	"path/filepath"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/unixsock"
)

// A process ends only for what another one would see differently.
func TestStaleSandbox(t *testing.T) {
	a, b := unixsock.FileID{Ino: 1}, unixsock.FileID{Ino: 2}
	sandboxed := view{Root: a, Registry: a, Links: a, rootReadOnly: true}
	change := func(f func(*view)) view { v := sandboxed; f(&v); return v }
	for what, c := range map[string]struct {
		first, now view
		want       bool
	}{
		"nothing changed":              {sandboxed, sandboxed, false},
		"recreated":                    {sandboxed, change(func(v *view) { v.Registry, v.registryReadOnly = b, true }), true},
		"recreated, no sandbox":        {view{Root: a, Registry: a}, view{Root: a, Registry: b}, false},
		"created after the start":      {change(func(v *view) { v.Registry = unixsock.FileID{} }), change(func(v *view) { v.registryReadOnly = true }), true},
		"removed":                      {sandboxed, change(func(v *view) { v.Registry = unixsock.FileID{} }), false},
		"read-only by an error":        {sandboxed, change(func(v *view) { v.registryReadOnly = true }), false},
		"read-only from the start":     {change(func(v *view) { v.registryReadOnly = true }), change(func(v *view) { v.registryReadOnly = true }), false},
		"mounted over":                 {sandboxed, change(func(v *view) { v.Root, v.Registry, v.rootReadOnly = b, b, false }), true},
		"root_dir was always writable": {change(func(v *view) { v.rootReadOnly = false }), change(func(v *view) { v.Root, v.rootReadOnly = b, false }), false},
		"unmounted on the host":        {sandboxed, change(func(v *view) { v.hidden = true }), true},
		"always another on the host":   {change(func(v *view) { v.hidden = true }), change(func(v *view) { v.hidden = true }), false},
		"root_dir is missing":          {sandboxed, view{}, false},
		"links removed":                {sandboxed, change(func(v *view) { v.Links = unixsock.FileID{} }), true},
		"links missing from the start": {change(func(v *view) { v.Links = unixsock.FileID{} }), change(func(v *view) { v.Links = unixsock.FileID{} }), true},
		"no directory at all":          {view{Root: a, rootReadOnly: true}, view{Root: a, rootReadOnly: true}, false},
		"links recreated by others":    {sandboxed, change(func(v *view) { v.Links = b }), true},
		"links removed, no sandbox":    {change(func(v *view) { v.rootReadOnly = false }), change(func(v *view) { v.rootReadOnly, v.Links = false, unixsock.FileID{} }), false},
		"links and registry removed":   {sandboxed, change(func(v *view) { v.Links, v.Registry = unixsock.FileID{}, unixsock.FileID{} }), false},
	} {
		if got := c.now.stale(c.first, false); (got != "") != c.want {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// Landlock holds for directories, not for paths: one that is recreated cannot be written, although
// its mount can be.
func TestStaleUnderLandlock(t *testing.T) {
	a, b, none := unixsock.FileID{Ino: 1}, unixsock.FileID{Ino: 2}, unixsock.FileID{}
	first := view{Root: a, Registry: a, Links: a}
	for what, c := range map[string]struct {
		first, now view
		want       bool
	}{
		"nothing changed":         {first, first, false},
		"recreated":               {first, view{Root: a, Registry: b, Links: a}, true},
		"created after the start": {view{Root: a, Links: a}, first, true},
		"removed":                 {first, view{Root: a, Links: a}, false},
		"links removed":           {first, view{Root: a, Registry: a}, true},
		"all recreated":           {first, view{Root: b, Registry: b, Links: none}, true},
	} {
		if got := c.now.stale(c.first, true); (got != "") != c.want {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// Once for the same directories, once a minute, for each reason; also in the next process.
func TestEndsForASandboxAreLimited(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sandbox.json")
	now := time.Now()
	v, other := view{Root: unixsock.FileID{Ino: 1}}, view{Root: unixsock.FileID{Ino: 2}}
	if err := writeEnded(file, ended{"r": {v, now}}); err != nil {
		t.Fatal(err)
	}
	e, err := readEnded(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		reason string
		v      view
		after  time.Duration
		wait   time.Duration
		may    bool
	}{
		{"r", v, time.Hour, 0, false},
		{"r", other, 20 * time.Second, 40 * time.Second, true},
		{"r", other, time.Minute, 0, true},
		{"another", v, 0, 0, true},
		{"r", other, -time.Hour, 0, true},
	} {
		if wait, may := e.in(c.reason, c.v, now.Add(c.after)); may != c.may || may && wait.Round(time.Second) != c.wait {
			t.Errorf("%+v: %s, %t", c, wait, may)
		}
	}
	if e, err := readEnded(filepath.Join(t.TempDir(), "none")); err != nil || len(e) > 0 {
		t.Errorf("no file: %v, %v", e, err)
	}
}

// A configuration that an earlier process wrote relaxes no owner.
func TestServedTrustsOnlyRoot(t *testing.T) {
	c := config.Default()
	c.Drivers = []config.Driver{config.DefaultDriver("a.example", "/a"), config.DefaultDriver("b.example", "/b")}
	c.Drivers[0].SocketOwner = "any"
	s := served(&config.InForce{Config: c}, []string{"a.example"})
	if len(s.Drivers) != 1 || s.Drivers[0].SocketOwner != config.DefaultDriver("a.example", "/a").SocketOwner {
		t.Errorf("%+v", s.Drivers)
	}
	if c.Drivers[0].SocketOwner != "any" {
		t.Error("the last good configuration was changed")
	}
}
