package distro

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const top = "../.."

// Units that must start before the kubelet are ordered before every unit that can run one.
func TestUnitsAreOrderedBeforeEveryKubelet(t *testing.T) {
	files := []string{filepath.Join(top, "systemd/csi-registrar.service")}
	examples, err := filepath.Glob(filepath.Join(top, "packaging/examples/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range examples {
		if ext := filepath.Ext(file); ext == ".service" || ext == ".container" {
			files = append(files, file)
		}
	}
	checked := 0
	for _, file := range files {
		before := before(t, file)
		if !slices.Contains(before, "kubelet.service") && file != files[0] {
			continue // it is no driver
		}
		checked++
		for _, unit := range Units() {
			if !slices.Contains(before, unit) {
				t.Errorf("%s: Before= lacks %s", file, unit)
			}
		}
		for _, unit := range before {
			if !slices.Contains(Units(), unit) {
				t.Errorf("%s: Before= has %s, which is not in the table", file, unit)
			}
		}
	}
	if checked < 2 {
		t.Fatalf("only %d units were checked", checked)
	}
}

// What InaccessiblePaths= hides, ReadWritePaths= of a drop-in cannot open (systemd.exec(5)).
func TestNoRootDirIsHidden(t *testing.T) {
	hidden := inaccessible(t)
	// The last one is where some have it with k3s and rke2, on the disk of everything else.
	for _, root := range append(RootDirs(), "/var/lib/rancher/kubelet") {
		if by := isBelow(root, hidden); by != "" {
			t.Errorf("the unit hides %s, and so root_dir %s", by, root)
		}
	}
}

// The unit hides where keys are, or nodes.md names it: each path that the unit hides makes each
// start slower, also where there is nothing.
func TestKeysAreHidden(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(top, "packaging/doc/nodes.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, documented, _ := strings.Cut(string(data), "\n## Directories with keys\n")
	hidden := append(inaccessible(t), "/home", "/root", "/run/user") // by ProtectHome=
	for _, d := range All() {
		secrets := d.Secrets
		for _, name := range KubeletSecrets {
			if d.RootDir == DefaultRootDir || name == "pki" {
				secrets = append(slices.Clone(secrets), filepath.Join(d.RootDir, name))
			}
		}
		var row []string
		for line := range strings.Lines(documented) {
			if rest, ok := strings.CutPrefix(line, "| "+d.Name+" | "); ok {
				row = strings.FieldsFunc(rest, func(r rune) bool { return strings.ContainsRune(" ,|\n", r) })
				break
			}
		}
		for _, path := range secrets {
			if isBelow(path, hidden) == "" && !slices.Contains(row, path) {
				t.Errorf("%s: neither does the unit hide %s, nor has nodes.md it below \"Directories with keys\"", d.Name, path)
			}
		}
	}
}

// inaccessible returns the paths that the unit hides.
func inaccessible(t *testing.T) (paths []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(top, "systemd/csi-registrar.service"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "InaccessiblePaths="); ok {
			for path := range strings.FieldsSeq(value) {
				paths = append(paths, strings.TrimPrefix(path, "-"))
			}
		}
	}
	if len(paths) < 20 {
		t.Fatalf("only %d paths were found", len(paths))
	}
	return paths
}

// isBelow returns the one of dirs that a path is, or is below; empty: none.
func isBelow(path string, dirs []string) string {
	for _, dir := range dirs {
		if strings.HasPrefix(path+"/", dir+"/") {
			return dir
		}
	}
	return ""
}

// before returns the units in the Before= lines of a unit or Quadlet.
func before(t *testing.T, file string) (units []string) {
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "Before="); ok {
			units = append(units, strings.Fields(value)...)
		}
	}
	return units
}

// The table of the documentation is that of the code.
func TestDocumentationNamesEveryKubelet(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(top, "packaging/doc/nodes.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range All() {
		cells := []string{d.Name, code(d.Units), code(d.Processes), code([]string{d.RootDir}), d.Note}
		if row := "| " + strings.TrimRight(strings.Join(cells, " | "), " ") + " |\n"; !strings.Contains(string(data), row) {
			t.Errorf("nodes.md lacks the row\n%s", row)
		}
	}
}

func code(words []string) string { return "`" + strings.Join(words, "`, `") + "`" }

// The names in the table are valid for /proc and systemd.
func TestTable(t *testing.T) {
	for _, d := range All() {
		for _, p := range d.Processes {
			if len(p) > 15 {
				t.Errorf("%s: /proc/PID/comm has at most 15 characters: %s", d.Name, p)
			}
		}
		for _, path := range append(d.Secrets, d.RootDir) {
			if !filepath.IsAbs(path) || filepath.Clean(path) != path {
				t.Errorf("%s: %s", d.Name, path)
			}
		}
		if len(d.Processes) == 0 || len(d.Units) == 0 {
			t.Errorf("%s has no process or no unit", d.Name)
		}
	}
}
