package cli

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unroff takes away what stands between the text of a page and the words to look for.
func unroff(t *testing.T, page string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "packaging", "man", page))
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(b), `\-`, "-")
}

// TestManCommands holds the sections of csi-registrar(1) against the table of commands and
// each command's flags, both ways.
func TestManCommands(t *testing.T) {
	want := map[string][]string{}
	var walk func(path []string, all []command)
	walk = func(path []string, all []command) {
		for _, c := range all {
			// cleanup is for units, and people who write units read pages.
			if c.hidden && c.name != "cleanup" {
				continue
			}
			words := append(slices.Clone(path), c.name)
			if c.sub != nil {
				walk(words, c.sub)
				continue
			}
			var flags []string
			fs := newFlagSet(words)
			c.setup(fs)
			fs.VisitAll(func(f *flag.Flag) {
				if f.Usage != "" {
					flags = append(flags, f.Name)
				}
			})
			heading := strings.Join(words, " ")
			if c.args != "" {
				heading += " " + c.args
			}
			want[heading] = flags
		}
	}
	walk(nil, commands())

	got := map[string][]string{}
	text, _, _ := strings.Cut(unroff(t, "csi-registrar.1"), "\n.SH EXIT STATUS")
	flagLine := regexp.MustCompile(`(?m)^\.BI? --([a-z-]+)`)
	for _, section := range strings.Split(text, "\n.SS ")[1:] {
		heading, body, _ := strings.Cut(section, "\n")
		flags := []string(nil)
		for _, m := range flagLine.FindAllStringSubmatch(body, -1) {
			flags = append(flags, m[1])
		}
		slices.Sort(flags)
		got[heading] = flags
	}
	for _, heading := range slices.Sorted(maps.Keys(want)) {
		flags, there := got[heading]
		if !there {
			t.Errorf("csi-registrar.1 has no section %q", heading)
		} else if !slices.Equal(flags, want[heading]) {
			t.Errorf("csi-registrar.1, section %q: it has the flags %q, the command %q", heading, flags, want[heading])
		}
	}
	for heading := range got {
		if _, there := want[heading]; !there {
			t.Errorf("csi-registrar.1 has a section %q, but there is no such command", heading)
		}
	}
}

// TestManKeys holds csi-registrar.toml(5) against the sample configuration, which package
// config holds against its schema.
func TestManKeys(t *testing.T) {
	sample, err := os.ReadFile(filepath.Join("..", "..", "packaging", "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{}
	table := ""
	for line := range strings.Lines(string(sample)) {
		if name, ok := strings.CutPrefix(line, "#["); ok {
			table = strings.TrimRight(strings.FieldsFunc(name, func(r rune) bool { return r == '.' || r == ']' })[0], "\n")
		} else if m := regexp.MustCompile(`^#([a-z_]+) *=`).FindStringSubmatch(line); m != nil {
			want[table] = append(want[table], m[1])
		}
	}
	got := map[string][]string{}
	for _, section := range strings.Split(unroff(t, "csi-registrar.toml.5"), "\n.SH KEYS OF [")[1:] {
		section, _, _ = strings.Cut(section, "\n.SH ")
		name := section[:strings.IndexAny(section, ".]")]
		for _, m := range regexp.MustCompile(`(?m)^\.TP\n\.B ([a-z_]+)$`).FindAllStringSubmatch(section, -1) {
			got[name] = append(got[name], m[1])
		}
	}
	if len(want["driver"]) == 0 {
		t.Fatal("the sample has no driver's key: this test cannot read it")
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if !slices.Equal(got[name], want[name]) {
			t.Errorf("csi-registrar.toml.5 has in [%s] the keys %q, the sample %q", name, got[name], want[name])
		}
	}
	for name := range got {
		if want[name] == nil {
			t.Errorf("csi-registrar.toml.5 has [%s], the sample does not", name)
		}
	}
}

// TestManUnits: each unit that is shipped is in csi-registrar.service(8).
func TestManUnits(t *testing.T) {
	units, err := filepath.Glob("../../systemd/*.s[eo][rc]*")
	if err != nil || len(units) == 0 {
		t.Fatal("cannot find the units", err)
	}
	name, _, _ := strings.Cut(unroff(t, "csi-registrar.service.8"), "\n.SH SYNOPSIS")
	for _, unit := range units {
		if !strings.Contains(name, filepath.Base(unit)) {
			t.Errorf("csi-registrar.service.8 does not name %s", filepath.Base(unit))
		}
	}
}
