package config

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/unixsock"
)

// FuzzLoad: whatever is in a main file and a drop-in, there is a configuration, it is
// consistent, and each error has a place that is there.
func FuzzLoad(f *testing.F) {
	f.Add("", "")
	f.Add(goodTable, "[driver.good]\ntimeout = \"1m\"\n[driver.bad]\nsocket = 1\n")
	f.Add("[kubelet]\nroot_dir = \"/k\"\n[log]\nlevel = \"warn\"\n", "driver.a = { socket = '/a', supported_versions = [\n\"1.0.0\",\n\"2\"] }")
	f.Add("[driver.a]\nsocket = \"/a\n[driver.b]\nsocket = '''/b'''\n[driver.a]\n", "\ufeffdriver.'../x'.socket = \"unix:///\\u0061\\U00000000\"\r\n")
	f.Fuzz(func(t *testing.T, main, dropIn string) {
		texts := map[string]string{"main": main, "drop-in": dropIn}
		l := newLoader()
		l.rank["drop-in"] = 1
		l.apply("main", main)
		l.apply("drop-in", dropIn)
		r := l.result()

		for _, m := range r.Errors {
			text, known := texts[m.File]
			if !known || m.Line < 0 || m.Line > strings.Count(text, "\n")+1 {
				t.Errorf("no such place: %+v", m)
			}
			if s := m.Error(); strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) || m.Problem == "" {
				t.Errorf("not fit to print: %q", s)
			}
			if m.Line > 0 {
				checkLine(t, m, strings.Split(text, "\n")[m.Line-1])
			}
		}
		checkConfig(t, r)
		if len(r.Errors) == 0 && len(r.Faulty) > 0 {
			t.Errorf("faulty without an error: %q", r.Faulty)
		}
		if again := one(r.Show()); !again.Config.Equal(r.Config) || len(again.Errors) > 0 {
			t.Errorf("shown and read again:\n%s\n%v", r.Show(), again.Errors)
		}
	})
}

// checkLine compares the line of an error with its key: the line contains the last part of the key,
// unless the file spells that part in another way.
func checkLine(t *testing.T, m Error, line string) {
	t.Helper()
	key := m.Key[strings.LastIndex(m.Key, ".")+1:]
	if key == "" || !bareKey.MatchString(key) || strings.Contains(line, `\`) || strings.Contains(m.Problem, "TOML") || strings.Contains(m.Problem, " in it") || strings.Contains(m.Problem, "not a version") {
		return
	}
	if !strings.Contains(line, key) {
		t.Errorf("%s\nis not in the line %q", m, line)
	}
}

func checkConfig(t *testing.T, r *Result) {
	t.Helper()
	c := r.Config
	if checkPath(c.Kubelet.RootDir) != nil {
		t.Errorf("root_dir %q", c.Kubelet.RootDir)
	}
	if !slices.IsSortedFunc(c.Drivers, func(a, b Driver) int { return strings.Compare(a.Name, b.Name) }) {
		t.Error("not sorted")
	}
	taken := make(map[string]string)
	for _, d := range c.Drivers {
		if err := csiname.CheckName(d.Name); err != nil {
			t.Error(err)
		}
		if slices.Contains(r.Faulty, d.Name) {
			t.Errorf("%s is right and faulty", d.Name)
		}
		for _, p := range []string{d.Socket, d.Endpoint} {
			if p == "" || p == "/" || len(p) > unixsock.MaxPath || checkPath(p) != nil {
				t.Errorf("path %q", p)
			}
			if other := taken[p]; d.Enabled && other != "" && other != d.Name {
				t.Errorf("%s and %s have %s", d.Name, other, p)
			}
			if d.Enabled {
				taken[p] = d.Name
			}
		}
		if len(c.Kubelet.PluginsRegistry()+"/"+rootdir.SocketName(d.Name)) > unixsock.MaxPath {
			t.Errorf("no room for the registration socket of %s", d.Name)
		}
		if d.Timeout <= 0 || d.WithdrawAfter <= 0 || len(d.SupportedVersions) == 0 || d.SocketOwner == "" || d.WhenGone != Keep && d.WhenGone != Withdraw {
			t.Errorf("%+v", d)
		}
	}
	for _, name := range r.Faulty {
		if err := csiname.CheckName(name); err != nil {
			t.Errorf("faulty: %v", err)
		}
	}
}

// basicString writes a string as TOML does.
func basicString(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r < ' ' || r == 0x7f || r == '"' || r == '\\' {
			fmt.Fprintf(&b, "\\u%04X", r)
		} else {
			b.WriteRune(r)
		}
	}
	return `"` + b.String() + `"`
}

// FuzzName: a name is a driver's if csiname.CheckName says so, else it is an error in the
// line that has it.
func FuzzName(f *testing.F) {
	for _, name := range []string{"nfs.csi.k8s.io", "Foo.Example", "", ".x", "../../x", "a b", "Under_score!", "a\nb", "a\x00", "a\"]\n[log]\n", strings.Repeat("a", 63), strings.Repeat("a", 64), "\xff", "driver", "\u202e"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if !utf8.ValidString(name) {
			return // not TOML: an error of the whole file
		}
		r := one("[driver." + basicString(name) + "]\nsocket = \"/a\"\n" + goodTable)
		if len(name) > 2*csiname.MaxName {
			return // too long a line says something else
		}
		if _, in := r.Config.Driver("good"); !in && name != "good" {
			t.Error("the other table is lost")
		}
		d, in := r.Config.Driver(name)
		switch csiname.CheckName(name) {
		case nil:
			if !in && name != "good" || d.Name != name && name != "good" {
				t.Errorf("%q: %+v %v", name, d, r.Errors)
			}
		default:
			if in || len(r.Errors) != 1 || r.Errors[0].Line != 1 || len(r.Faulty) > 0 {
				t.Errorf("%q: %+v %v %q", name, d, r.Errors, r.Faulty)
			}
		}
	})
}
