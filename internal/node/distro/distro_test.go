package distro

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const top = "../../.."

// before-kubelet.conf has the one list of units that can run a kubelet. Everything that must start
// before the kubelet is ordered before csi-drivers.target, and pulls it in: without a job of the
// target systemd would not order the two.
func TestUnitsAreOrderedBeforeEveryKubelet(t *testing.T) {
	const target = "csi-drivers.target"
	got := setting(t, filepath.Join(top, "systemd/before-kubelet.conf"), "Before")
	slices.Sort(got)
	want := slices.Sorted(slices.Values(Units()))
	if !slices.Equal(got, want) {
		t.Errorf("Before= has\n%q, the table\n%q", got, want)
	}
	files, err := filepath.Glob(filepath.Join(top, "packaging/examples/*/csi-*"))
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, filepath.Join(top, "systemd/csi-registrar.service"))
	checked := 0
	for _, file := range files {
		if ext := filepath.Ext(file); ext != ".service" && ext != ".container" {
			continue
		}
		checked++
		for _, name := range []string{"Before", "Wants"} {
			if !slices.Contains(setting(t, file, name), target) {
				t.Errorf("%s: %s= lacks %s", file, name, target)
			}
		}
	}
	if checked < 8 {
		t.Fatalf("only %d units were checked", checked)
	}
}

// No root directory is below a path in InaccessiblePaths=, which ReadWritePaths= of a drop-in could
// not open (systemd.exec(5)).
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
	for _, d := range All {
		secrets := d.Secrets
		for _, name := range KubeletSecrets {
			if d.RootDir == DefaultRootDir || name == "pki" {
				secrets = append(slices.Clone(secrets), filepath.Join(d.RootDir, name))
			}
		}
		var row []string
		for line := range strings.Lines(documented) {
			if rest, ok := strings.CutPrefix(line, "| "+d.Name+" | "); ok {
				row = append(row, strings.FieldsFunc(rest, func(r rune) bool { return strings.ContainsRune(" ,|\n", r) })...)
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
		line = strings.TrimSpace(line)
		if path, ok := strings.CutPrefix(line, "BindReadOnlyPaths=-/run/systemd/inaccessible/dir:"); ok {
			paths = append(paths, path)
		}
		if value, ok := strings.CutPrefix(line, "InaccessiblePaths="); ok {
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

// setting returns the words of all lines NAME=WORDS of a unit or Quadlet.
func setting(t *testing.T, file, name string) (words []string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+"="); ok {
			words = append(words, strings.Fields(value)...)
		}
	}
	return words
}

// The table of the documentation is that of the code.
func TestDocumentationNamesEveryKubelet(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(top, "packaging/doc/nodes.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range All {
		cells := []string{d.Name, code(d.Units), code(d.Processes), code([]string{d.RootDir}), d.Note}
		if row := "| " + strings.TrimRight(strings.Join(cells, " | "), " ") + " |\n"; !strings.Contains(string(data), row) {
			t.Errorf("nodes.md lacks the row\n%s", row)
		}
	}
}

func code(words []string) string { return "`" + strings.Join(words, "`, `") + "`" }

// The names in the table are valid for /proc and systemd.
func TestTable(t *testing.T) {
	for _, d := range All {
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
