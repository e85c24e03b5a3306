package daemon

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// A process ends only for what another one would see differently.
func TestStaleSandbox(t *testing.T) {
	a, b := unixsock.FileID{Ino: 1}, unixsock.FileID{Ino: 2}
	sandboxed := view{Root: a, Registry: a, rootReadOnly: true}
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
		"mounted over":                 {sandboxed, change(func(v *view) { v.Root, v.Registry, v.rootReadOnly = b, b, false }), true},
		"root_dir was always writable": {change(func(v *view) { v.rootReadOnly = false }), change(func(v *view) { v.Root, v.rootReadOnly = b, false }), false},
		"unmounted on the host":        {sandboxed, change(func(v *view) { v.hidden = true }), true},
		"always another on the host":   {change(func(v *view) { v.hidden = true }), change(func(v *view) { v.hidden = true }), false},
		"root_dir is missing":          {sandboxed, view{}, false},
		"journald's socket removed":    {sandboxed, change(func(v *view) { v.Journal = b }), true},
		"no directory at all":          {view{Root: a, rootReadOnly: true}, view{Root: a, rootReadOnly: true}, false},
	} {
		if got := c.now.stale(c.first, false); (len(got) > 0) != c.want {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// Landlock holds for directories, not for paths: one that is recreated cannot be written, although
// its mount can be.
func TestStaleUnderLandlock(t *testing.T) {
	a, b := unixsock.FileID{Ino: 1}, unixsock.FileID{Ino: 2}
	first := view{Root: a, Registry: a}
	for what, c := range map[string]struct {
		first, now view
		want       bool
	}{
		"nothing changed":         {first, first, false},
		"recreated":               {first, view{Root: a, Registry: b}, true},
		"created after the start": {view{Root: a}, first, true},
		"removed":                 {first, view{Root: a}, false},
		"all recreated":           {first, view{Root: b, Registry: b}, true},
	} {
		if got := c.now.stale(c.first, true); (len(got) > 0) != c.want {
			t.Errorf("%s: %q", what, got)
		}
	}
}

// A kubelet that starts beside the daemon can create plugins_registry after the sandbox, and before
// the first look: one process ends for it, and the next one does not.
func TestStaleFromTheStart(t *testing.T) {
	v := view{Root: unixsock.FileID{Ino: 1}, Registry: unixsock.FileID{Ino: 2}, registryReadOnly: true, rootReadOnly: true}
	guard := sandboxGuard{before: ended{}}
	reason, wait := guard.look(v, time.Now())
	if reason == "" || wait != 0 {
		t.Fatalf("%q after %s", reason, wait)
	}
	guard = sandboxGuard{before: ended{reason: {v, time.Now()}}}
	for range 2 {
		if reason, _ := guard.look(v, time.Now().Add(time.Hour)); reason != "" {
			t.Errorf("another process ends: %s", reason)
		}
	}
	v.registryReadOnly = false
	guard = sandboxGuard{before: ended{}}
	if reason, _ := guard.look(v, time.Now()); reason != "" {
		t.Errorf("it can be written: %s", reason)
	}
}

// It can also create plugins_registry after the process was confined, and before the first look.
func TestStaleFromTheConfinement(t *testing.T) {
	v := view{Root: unixsock.FileID{Ino: 1}, Registry: unixsock.FileID{Ino: 2}}
	for name, c := range map[string]struct {
		confined bool
		writable unixsock.FileID
		want     bool
	}{
		"created":      {true, unixsock.FileID{}, true},
		"recreated":    {true, unixsock.FileID{Ino: 3}, true},
		"was there":    {true, v.Registry, false},
		"not confined": {false, unixsock.FileID{}, false},
	} {
		guard := sandboxGuard{confined: c.confined, writable: c.writable, before: ended{}}
		if reason, _ := guard.look(v, time.Now()); (reason != "") != c.want {
			t.Errorf("%s: %q", name, reason)
		}
	}
}

// A mount elsewhere on the host needs no look at the mounts of the sandbox.
func TestHiddenFromHostOfTheLastLook(t *testing.T) {
	registry := filepath.Join(t.TempDir(), "plugins_registry")
	if err := os.Mkdir(registry, 0o750); err != nil {
		t.Fatal(err)
	}
	first, err := lookAround(registry, view{})
	if err != nil || first.onHost == "" {
		t.Skipf("the mounts of the host cannot be read: %+v, %v", first, err)
	}
	last := first
	last.hidden = !first.hidden
	if v, err := lookAround(registry, last); err != nil || v.hidden != last.hidden {
		t.Errorf("compared again: %+v, %v", v, err)
	}
	last.onHost = "another directory"
	if v, err := lookAround(registry, last); err != nil || v.hidden != first.hidden || v.onHost != first.onHost {
		t.Errorf("not compared: %+v, %v", v, err)
	}
}

// A process that may not end for one reason, as another would see the same, ends for the next one,
// with that one's pause.
func TestStaleForTwoReasons(t *testing.T) {
	now := time.Now()
	v := view{Root: unixsock.FileID{Ino: 1}, Registry: unixsock.FileID{Ino: 2}, registryReadOnly: true, rootReadOnly: true}
	first := sandboxGuard{before: ended{}}
	readOnly, _ := first.look(v, now)
	guard := sandboxGuard{before: ended{readOnly: {v, now}}}
	now = now.Add(time.Hour)
	if reason, _ := guard.look(v, now); reason != "" {
		t.Fatalf("another process ends: %s", reason)
	}
	v.Journal = unixsock.FileID{Ino: 3}
	for _, wait := range []time.Duration{journalPause, journalPause / 2} {
		if reason, got := guard.look(v, now); reason != journalLost || got != wait {
			t.Errorf("%q after %s, want %s", reason, got, wait)
		}
		now = now.Add(journalPause / 2)
	}
	v.Registry.Ino++
	if reason, wait := guard.look(v, now); reason != readOnly || wait != 0 {
		t.Errorf("%q after %s", reason, wait)
	}
}

// TestJournalMustStayLost checks that the wait for journald's next socket starts again when
// the socket existed in between, and is at least as long as the pause between two restarts.
func TestJournalMustStayLost(t *testing.T) {
	now := time.Now()
	there, lost := view{}, view{Journal: unixsock.FileID{Ino: 3}}
	guard := sandboxGuard{before: ended{}}
	for _, step := range []struct {
		v    view
		wait time.Duration // zero: it need not end
	}{{there, 0}, {lost, journalPause}, {there, 0}, {lost, journalPause}} {
		if reason, wait := guard.look(step.v, now); (reason == "") != (step.wait == 0) || wait != step.wait {
			t.Errorf("%q after %s, want %s", reason, wait, step.wait)
		}
		now = now.Add(journalPause / 2)
	}
	other := view{Journal: unixsock.FileID{Ino: 2}}
	guard = sandboxGuard{before: ended{journalLost: {other, now.Add(-10 * time.Second)}}}
	guard.look(there, now)
	if reason, wait := guard.look(lost, now); reason != journalLost || wait != sandboxPause-10*time.Second {
		t.Errorf("%q after %s", reason, wait)
	}
}

// Once for the same directories, once a minute, for each reason; also in the next process.
func TestEndsForASandboxAreLimited(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sandbox.json")
	now := time.Now()
	v, other := view{Root: unixsock.FileID{Ino: 1}}, view{Root: unixsock.FileID{Ino: 2}}
	if err := writeEnded(file, ended{"r": {v, now}, journalLost: {v, now}}); err != nil {
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
		{"r", view{Root: v.Root, Journal: unixsock.FileID{Ino: 3}}, time.Hour, 0, false},
		{journalLost, view{Root: v.Root, Journal: unixsock.FileID{Ino: 3}}, time.Hour, 0, true},
		{journalLost, other, time.Hour, 0, false},
	} {
		if wait, may := e.mayEnd(c.reason, c.v, now.Add(c.after)); may != c.may || may && wait.Round(time.Second) != c.wait {
			t.Errorf("%+v: %s, %t", c, wait, may)
		}
	}
	if e, err := readEnded(filepath.Join(t.TempDir(), "none")); err != nil || len(e) > 0 {
		t.Errorf("no file: %v, %v", e, err)
	}
}

// A configuration that an earlier process wrote relaxes no owner. A lost owner stays unknown to the
// processes after the next one, too.
func TestServedTrustsOnlyRoot(t *testing.T) {
	c := config.Default()
	c.Drivers = []config.Driver{config.DefaultDriver("a.example", "/a"), config.DefaultDriver("b.example", "/b"), config.DefaultDriver("c.example", "/c")}
	c.Drivers[0].SocketOwner = "any"
	s := &config.InForce{Config: c}
	for range 2 {
		s = served(s, []string{"a.example", "c.example"})
		if len(s.Drivers) != 2 || s.Drivers[0].SocketOwner != config.DefaultDriver("a.example", "/a").SocketOwner ||
			!s.Drivers[0].OwnerUnknown || s.Drivers[1].OwnerUnknown {
			t.Errorf("%+v", s.Drivers)
		}
	}
	if c.Drivers[0].SocketOwner != "any" || c.Drivers[0].OwnerUnknown {
		t.Error("the last good configuration was changed")
	}
}

// After a restart a driver whose table disappeared with its socket_owner is not asked, and is no
// mismatch, which would withdraw it. Another name at its socket still is one, and so is an
// untrusted socket of a driver whose socket_owner was the default.
func TestLostSocketOwnerIsNoMismatch(t *testing.T) {
	for name, c := range map[string]struct {
		mode  os.FileMode // of the socket's directory
		owner trust.SocketOwner
		name  string // that the driver reports
		want  status.DriverState
	}{
		"untrusted":                {0o777, trust.Anybody, "a.example", status.Starting},
		"trusted":                  {0o700, trust.Anybody, "a.example", status.Ready},
		"another driver":           {0o700, trust.Anybody, "b.example", status.Mismatch},
		"untrusted, default owner": {0o777, config.DefaultDriver("", "").SocketOwner, "a.example", status.Mismatch},
	} {
		t.Run(name, func(t *testing.T) {
			d := fake.NewDriver(filepath.Join(fake.ShortDir(t), "s"), fake.Healthy(c.name))
			if _, err := d.Start(); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(filepath.Dir(d.Socket), c.mode); err != nil {
				t.Fatal(err)
			}
			table := config.DefaultDriver("a.example", d.Socket)
			table.SocketOwner = c.owner
			good := config.Default()
			good.Drivers = []config.Driver{table}
			before := served(&config.InForce{Config: good}, []string{"a.example"})
			grace := config.Grace{Period: time.Minute}
			kept := grace.Keep(before, &config.Result{Config: config.Default()}, time.Now(), false, nil)
			log, pool := slog.New(slog.DiscardHandler), worker.NewPool()
			p := &parts{daemon: &daemon{log: log, pool: pool, watcher: fswatch.New(log, pool)}}
			o := p.Driver(kept.Config.Drivers[0])
			o.Follow(true, true, 0)
			for o.Look().AskedAt.IsZero() {
				<-o.Hints()
			}
			if v := o.Look(); v.Driver != c.want {
				t.Errorf("%s, want %s: %s", v.Driver, c.want, v.Reason)
			}
			o.Close()
			if err := d.Stop(); err != nil {
				t.Error(err)
			}
		})
	}
}
