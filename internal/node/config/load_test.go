package config

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/sys/trust"
)

// tree makes files below a new root. The text "-> TARGET" makes a link.
func tree(t *testing.T, files map[string]string) Source {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, link := strings.CutPrefix(text, "-> "); link {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Source{Root: root}
}

// below cuts the root off the paths in s.
func (s Source) below(text string) string { return strings.ReplaceAll(text, s.Root+"/", "/") }

func (s Source) check(t *testing.T, r *Result, errors string) {
	t.Helper()
	if got := s.below(r.Errors.Error()); got != errors {
		t.Errorf("errors\n%s\nwant\n%s", got, errors)
	}
}

func (s Source) filesOf(r *Result) string { return s.below(strings.Join(r.Files, " ")) }

const (
	inEtc = "etc/csi-registrar/"
	inRun = "run/csi-registrar/"
	inLib = "usr/lib/csi-registrar/"
)

func TestDefault(t *testing.T) {
	r := Load(Source{Root: t.TempDir()})
	if r.Errors != nil || len(r.Files) > 0 || !r.Config.Equal(Default()) || r.Config.Drivers != nil {
		t.Errorf("without files: %+v", r)
	}
	if got := r.Config.Kubelet.PluginsRegistry(); got != "/var/lib/kubelet/plugins_registry" {
		t.Error(got)
	}
	// The defaults that csi-registrar.toml(5) names.
	s := tree(t, map[string]string{inEtc + "config.toml": "[driver.a]\nsocket = \"unix:///run/a.sock\"\n"})
	want := Driver{
		Connection: Connection{Name: "a", Socket: "/run/a.sock", Endpoint: "/run/a.sock", Timeout: 5 * time.Second, SocketOwner: "root"},
		Enabled:    true, SupportedVersions: []string{"1.0.0"}, WhenGone: "keep", WithdrawAfter: 30 * time.Second,
		ProbeEvery: time.Minute, WhenLimitChanges: "republish",
	}
	r = Load(s)
	if d, ok := r.Config.Driver("a"); !ok || !d.Equal(want) {
		t.Errorf("got %+v, want %+v; %v", d, want, r.Errors)
	}
	if _, ok := r.Config.Driver("b"); ok {
		t.Error("found what is not there")
	}
	if r.Config.Equal(Default()) {
		t.Error("Equal")
	}
}

func TestDriverEqual(t *testing.T) {
	a := DefaultDriver("a", "/a")
	for i, change := range []func(*Driver){
		func(d *Driver) { d.Name = "b" }, func(d *Driver) { d.Socket = "/b" }, func(d *Driver) { d.Endpoint = "/b" },
		func(d *Driver) { d.Enabled = false }, func(d *Driver) { d.Timeout++ }, func(d *Driver) { d.WithdrawAfter++ },
		func(d *Driver) { d.SupportedVersions = []string{"1.1.0"} }, func(d *Driver) { d.WhenGone = Withdraw },
		func(d *Driver) { d.SocketOwner = trust.Anybody },
	} {
		b := a
		change(&b)
		if a.Equal(b) || !b.Equal(b) {
			t.Errorf("change %d is not seen", i)
		}
	}
}

// TestPrecedence: key by key, in the order of file names, whatever the place.
func TestPrecedence(t *testing.T) {
	driver := func(lines string) string { return "[driver.a]\n" + lines }
	s := tree(t, map[string]string{
		inEtc + "config.toml":         "[log]\nlevel = \"warn\"\nformat = \"json\"\n",
		inRun + "config.toml":         "no TOML, but nobody reads it",
		inLib + "config.toml":         "no TOML, but nobody reads it",
		inLib + "conf.d/20-a.toml":    driver("socket = \"/a\"\ntimeout = \"1s\"\nwithdraw_after = \"1s\"\nsocket_owner = \"1\"\n"),
		inEtc + "conf.d/10-a.toml":    driver("timeout = \"2s\"\nenabled = false\nendpoint = \"/lib/a\"\n"),
		inEtc + "conf.d/60-a.toml":    driver("withdraw_after = \"3s\"\nwhen_driver_is_gone = \"withdraw\"\nprobe_every = \"0\"\nwhen_limit_changes = \"leave\"\n"),
		inRun + "conf.d/50-a.toml":    driver("withdraw_after = \"4s\"\nsupported_versions = [\"0.3.0\", \"1.1.0\"]\n"),
		inRun + "conf.d/.60-a.toml":   "hidden",
		inRun + "conf.d/60-a.toml.sv": "not *.toml",
		inRun + "conf.d/.toml":        "neither",
	})
	r := Load(s)
	s.check(t, r, "")
	if got, want := s.filesOf(r), "/etc/csi-registrar/config.toml /etc/csi-registrar/conf.d/10-a.toml /usr/lib/csi-registrar/conf.d/20-a.toml"+
		" /run/csi-registrar/conf.d/50-a.toml /etc/csi-registrar/conf.d/60-a.toml"; got != want {
		t.Errorf("files\n%s, want\n%s", got, want)
	}
	want := &Config{Kubelet: Default().Kubelet, Log: Log{"warn", "json"}, Drivers: []Driver{{
		Connection: Connection{Name: "a", Socket: "/a", Endpoint: "/lib/a", Timeout: time.Second, SocketOwner: "1"},
		Enabled:    false, SupportedVersions: []string{"0.3.0", "1.1.0"}, WhenGone: Withdraw, WithdrawAfter: 3 * time.Second,
		WhenLimitChanges: Leave,
	}}}
	if !r.Config.Equal(want) {
		t.Errorf("got %+v, want %+v", r.Config, want)
	}
	for key, want := range map[string]string{
		`log.level`:                 "/etc/csi-registrar/config.toml:2",
		`kubelet.root_dir`:          "default",
		`driver."a".socket`:         "/usr/lib/csi-registrar/conf.d/20-a.toml:2",
		`driver."a".timeout`:        "/usr/lib/csi-registrar/conf.d/20-a.toml:3",
		`driver."a".withdraw_after`: "/etc/csi-registrar/conf.d/60-a.toml:2",
	} {
		if got := s.below(r.Origin(key)); got != want {
			t.Errorf("%s is from %s, want %s", key, got, want)
		}
	}
}

func TestMainFile(t *testing.T) {
	const level = "[log]\nlevel = \"%\"\n"
	files := map[string]string{}
	for _, c := range []struct{ file, level, want string }{
		{inLib, "debug", "debug"}, {inRun, "warn", "warn"}, {inEtc, "error", "error"},
	} {
		files[c.file+"config.toml"] = strings.ReplaceAll(level, "%", c.level)
		s := tree(t, files)
		r := Load(s)
		s.check(t, r, "")
		if r.Config.Log.Level != c.want || len(r.Files) != 1 {
			t.Errorf("%s: level %s, files %q", c.file, r.Config.Log.Level, r.Files)
		}
	}
}

func TestMasks(t *testing.T) {
	table := func(name string) string { return "[driver." + name + "]\nsocket = \"/" + name + "\"\n" }
	s := tree(t, map[string]string{
		inEtc + "config.toml":      "-> /dev/null",
		inRun + "config.toml":      "hidden",
		inEtc + "conf.d/20-a.toml": "",
		inRun + "conf.d/20-a.toml": "hidden",
		inLib + "conf.d/20-a.toml": "hidden too",
		inRun + "conf.d/20-b.toml": "-> /dev/null",
		inLib + "conf.d/20-b.toml": "hidden",
		inEtc + "conf.d/20-f.toml": "-> " + strings.Repeat("../", 30) + "dev/null",
		inEtc + "conf.d/20-c.toml": table("etc"),
		inRun + "conf.d/20-c.toml": "hidden",
		inRun + "conf.d/20-d.toml": table("run"),
		inLib + "conf.d/20-d.toml": "hidden",
		inLib + "conf.d/20-e.toml": "-> ../e.toml",
		inLib + "e.toml":           table("link"),
	})
	r := Load(s)
	s.check(t, r, "")
	if got, want := s.filesOf(r), "/etc/csi-registrar/conf.d/20-c.toml /run/csi-registrar/conf.d/20-d.toml /usr/lib/csi-registrar/conf.d/20-e.toml"; got != want {
		t.Errorf("files\n%s, want\n%s", got, want)
	}
	var hidden []string
	for _, h := range r.Hidden {
		hidden = append(hidden, s.below(h.File+" "+h.By))
	}
	if want := []string{
		"/run/csi-registrar/config.toml /etc/csi-registrar/config.toml",
		"/run/csi-registrar/conf.d/20-a.toml /etc/csi-registrar/conf.d/20-a.toml",
		"/run/csi-registrar/conf.d/20-c.toml /etc/csi-registrar/conf.d/20-c.toml",
		"/usr/lib/csi-registrar/conf.d/20-a.toml /etc/csi-registrar/conf.d/20-a.toml",
		"/usr/lib/csi-registrar/conf.d/20-b.toml /run/csi-registrar/conf.d/20-b.toml",
		"/usr/lib/csi-registrar/conf.d/20-d.toml /run/csi-registrar/conf.d/20-d.toml",
	}; !slices.Equal(hidden, want) {
		t.Errorf("hidden\n%q, want\n%q", hidden, want)
	}
	if len(r.Config.Drivers) != 3 {
		t.Errorf("drivers %+v", r.Config.Drivers)
	}
}

// One run names all errors, and the places are those of the values.
func TestErrorsOfAllFiles(t *testing.T) {
	s := tree(t, map[string]string{
		inEtc + "config.toml":         "[kubelet]\nroot_dir = \"/k\"\n[log]\nlevel = \"loud\"\n",
		inLib + "conf.d/10-a.toml":    "# a package's\n[driver.a]\nsocket = \"/a\"\ntimeout = \"1\"\n",
		inLib + "conf.d/20-b.toml":    "[driver.b]\nsocket = \"/b\"\n",
		inRun + "conf.d/30-c.toml":    "[driver.c]\nsocket = \"/b\"\n",
		inEtc + "conf.d/60-a.toml":    "[driver.a]\ntimeout = \"2s\"\n[driver.gone]\ntimeout = \"2s\"\n",
		inEtc + "conf.d/70-gone.toml": "[driver.gone]\nenabled = false\n",
	})
	r := Load(s)
	s.check(t, r, `/etc/csi-registrar/config.toml:4: log.level: "loud" is not known (must be "debug", "info", "warn" or "error")
/usr/lib/csi-registrar/conf.d/10-a.toml:4: driver."a".timeout: "1" is not a duration`+wantSpan+`
/run/csi-registrar/conf.d/30-c.toml:2: driver."c".socket: is "/b", which is also driver."b".socket (/usr/lib/csi-registrar/conf.d/20-b.toml:2) (each driver has its own: write enabled = false in one of the tables, or another path)
/etc/csi-registrar/conf.d/60-a.toml:3: driver."gone": has no socket (write socket = "/run/….sock"; if the table only tunes a driver whose own file was removed, remove it)`)
	if !slices.Equal(r.Faulty, []string{"a", "c", "gone"}) {
		t.Errorf("faulty %q", r.Faulty)
	}
	want := Default()
	want.Kubelet.RootDir = "/k"
	want.Drivers = []Driver{DefaultDriver("b", "/b")}
	if !r.Config.Equal(want) {
		t.Errorf("got %+v, want %+v", r.Config, want)
	}
}

// Only the part with an error is left out; files of the same name stay hidden.
func TestOnlyWhatHasAnErrorIsLeftOut(t *testing.T) {
	table := func(name string) string { return "[driver.\"" + name + "\"]\nsocket = \"/" + name + "\"\n" }
	packaged := map[string]string{
		inLib + "conf.d/20-nfs.toml": table("nfs.example"),
		inLib + "conf.d/20-smb.toml": table("smb.example"),
		inLib + "conf.d/20-x.toml":   table("x.example"),
	}
	const all = "nfs.example smb.example x.example"
	for _, c := range []struct{ what, file, text, drivers string }{
		{"syntax", "conf.d/60-a.toml", "[driver.\"nfs.example\"]\nenabled = no\n", all},
		{"no table", "conf.d/60-a.toml", "[driver.\"nfs.example\"\n", all},
		{"a mistyped table", "conf.d/60-a.toml", "[drvier.\"nfs.example\"]\nenabled = false\n", all},
		{"no quotes", "conf.d/60-a.toml", "[driver.nfs.example]\nenabled = false\n", all},
		{"a wrong value", "conf.d/60-a.toml", "[driver.\"nfs.example\"]\nenabled = 0\n[log]\nlevel = 1", "smb.example x.example"},
		{"an unknown key", "conf.d/60-a.toml", "[driver.\"nfs.example\"]\nenabeld = true\n", "smb.example x.example"},
		{"UTF-16", "conf.d/60-a.toml", "\xff\xfe[\x00d\x00", all},
		{"nothing there", "conf.d/60-a.toml", "-> nowhere", all},
		{"root_dir", "conf.d/60-a.toml", "[kubelet]\nroot_dir = \"k\"\n", ""},
		{"hidden", "conf.d/20-x.toml", "[driver.\"nfs.example\"]\nenabled = no\n", "nfs.example smb.example"},
		{"the main file", "config.toml", "[driver.\"nfs.example\"]\nenabled = no\n", all},
		{"a typo in the main file", "config.toml", "[kubelt]\nroot_dir = \"/data\"\n", all},
		{"a table of the main file", "config.toml", "[driver.\"nfs.example\"]\nenabled = 0\n", "smb.example x.example"},
		{"no directory", "conf.d", "a file", "nfs.example smb.example x.example"},
	} {
		files := maps.Clone(packaged)
		files[inEtc+c.file] = c.text
		r := Load(tree(t, files))
		var drivers []string
		for _, d := range r.Config.Drivers {
			drivers = append(drivers, d.Name)
		}
		if got := strings.Join(drivers, " "); got != c.drivers || len(r.Errors) == 0 {
			t.Errorf("%s: %q, want %q; %v", c.what, got, c.drivers, r.Errors)
		}
	}
}

// Each field of a table is the value of exactly one key, so that reading, printing and comparing
// know it, and its key has another value than the default in TestPrecedence.
func TestEachFieldHasAKey(t *testing.T) {
	fields := map[string]string{} // by key
	for _, f := range driverFields() {
		var d, with Driver
		f.unset(&with)
		if reflect.DeepEqual(d, with) { // the default is the zero value
			set := map[string]any{"socket": "/s", "endpoint": "/e"}[f.key]
			if set == nil {
				t.Fatalf("%s: add a value of it to this test", f.key)
			}
			if err := f.set(&with, set); err != nil {
				t.Fatal(err)
			}
		}
		for _, v := range reflect.VisibleFields(reflect.TypeFor[Driver]()) {
			now, zero := reflect.ValueOf(with).FieldByIndex(v.Index), reflect.ValueOf(d).FieldByIndex(v.Index)
			if !v.Anonymous && !reflect.DeepEqual(now.Interface(), zero.Interface()) {
				if fields[v.Name] != "" {
					t.Errorf("%s is the value of %s and %s", v.Name, fields[v.Name], f.key)
				}
				fields[v.Name] = f.key
			}
		}
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Driver]()) {
		if fields[f.Name] == "" && !f.Anonymous && !slices.Contains([]string{"Name", "KeptFor", "OwnerUnknown"}, f.Name) {
			t.Errorf("%s is the value of no key", f.Name)
		}
	}
}

// A root that does not exist is an error: nothing would be checked.
func TestMissingRoot(t *testing.T) {
	root := t.TempDir()
	if r := Load(Source{Root: root}); len(r.Errors) > 0 {
		t.Errorf("an empty root: %v", r.Errors)
	}
	if r := Load(Source{Root: root + "/typo"}); len(r.Errors) != 1 || r.Errors[0].File != root+"/typo" || !strings.Contains(r.Errors[0].Error(), "no such file or directory (--config-root takes") {
		t.Errorf("a missing root: %v", r.Errors)
	}
}
