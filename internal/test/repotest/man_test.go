package repotest

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/cli"
)

// TestManCommands compares the sections of csi-registrar(1) with the commands and flags that help
// names, both ways.
func TestManCommands(t *testing.T) {
	want := map[string][]string{}
	var walk func(path []string)
	walk = func(path []string) {
		text := help(t, path...)
		if commands := firsts(`(?m)^  ([a-z]+)  `, text); strings.Contains(text, " COMMAND ") {
			for _, name := range commands {
				walk(append(slices.Clone(path), name))
			}
			return
		}
		heading := firsts(`^usage: csi-registrar (.*)\n`, text)[0]
		want[strings.TrimSuffix(heading, " [FLAG...]")] = firsts(`(?m)^  --([a-z-]+)`, text)
	}
	walk(nil)
	if len(want) < 10 {
		t.Fatalf("cannot find the commands in the output of help: %v", want)
	}

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
		flags, ok := got[heading]
		if !ok {
			t.Errorf("csi-registrar.1 has no section %q", heading)
		} else if !slices.Equal(flags, want[heading]) {
			t.Errorf("csi-registrar.1, section %q: it has the flags %q, the command %q", heading, flags, want[heading])
		}
	}
	for heading := range got {
		if _, ok := want[heading]; !ok {
			t.Errorf("csi-registrar.1 has a section %q, but there is no such command", heading)
		}
	}
}

// help returns the output of `csi-registrar help WORD...`.
func help(t *testing.T, words ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if code := cli.Main(append([]string{"help"}, words...), nil, &stdout, &stderr); code != 0 {
		t.Fatalf("help %q ends with %d: %s", words, code, stderr.String())
	}
	return stdout.String()
}

// TestManKeys compares csi-registrar.toml(5) with the sample configuration, which package config
// compares with its schema.
func TestManKeys(t *testing.T) {
	sample, err := os.ReadFile(filepath.Join("..", "..", "..", "packaging", "config.toml"))
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

// TestManUnits checks that csi-registrar.service(8) names each shipped unit.
func TestManUnits(t *testing.T) {
	units, err := filepath.Glob("../../../systemd/*.[st][eoa][rc]*[et]")
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
