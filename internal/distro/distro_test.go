package distro

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const top = "../.."

// What must start before the kubelet is ordered before every unit that can run one.
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
			if !IsUnit(unit) {
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
	file := filepath.Join(top, "systemd/csi-registrar.service")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	hidden := 0
	for line := range strings.Lines(string(data)) {
		value, ok := strings.CutPrefix(strings.TrimSpace(line), "InaccessiblePaths=")
		if !ok {
			continue
		}
		for path := range strings.FieldsSeq(value) {
			path = strings.TrimPrefix(path, "-")
			hidden++
			// The last one is where some have it with k3s and rke2, on the disk of everything else.
			for _, root := range append(RootDirs(), "/var/lib/rancher/kubelet") {
				if strings.HasPrefix(root+"/", path+"/") {
					t.Errorf("%s hides %s, and so root_dir %s", file, path, root)
				}
			}
		}
	}
	if hidden < 20 {
		t.Fatalf("only %d paths were checked", hidden)
	}
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

// Whatever has the names is compared with what /proc and systemd can show.
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
