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
	want := slices.Sorted(slices.Values(Units))
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
	for _, root := range append(slices.Clone(RootDirs), "/var/lib/rancher/kubelet") {
		if by := isBelow(root, hidden); by != "" {
			t.Errorf("the unit hides %s, and so root_dir %s", by, root)
		}
	}
}

// The unit hides the directories of which nodes.md says so, and the files with credentials that are
// not in them. It hides the kubelet's own keys, or nodes.md has a row for them: each path that the
// unit hides makes each start slower, also where there is nothing.
func TestKeysAreHidden(t *testing.T) {
	_, section, _ := strings.Cut(nodes(t), "\n## Directories with keys\n\n")
	text, table, _ := strings.Cut(section, "\n| node | |\n")
	first, _, _ := strings.Cut(text, ". If the\nkubelet's root directory")
	words := func(s string) []string {
		return strings.FieldsFunc(s, func(r rune) bool { return strings.ContainsRune(" ,|\n", r) })
	}
	hidden := inaccessible(t)
	must := slices.DeleteFunc(words(first), func(w string) bool { return !filepath.IsAbs(w) || w == "/var/lib/rancher" })
	if len(must) < 6 {
		t.Fatalf("nodes.md says only of %q that the unit hides them", must)
	}
	for _, name := range []string{"k3s", "rke2", "agent", "capr"} {
		must = append(must, "/var/lib/rancher/"+name)
	}
	for _, name := range []string{"pki", "kubeconfig", "bootstrap-kubeconfig"} {
		must = append(must, "/var/lib/kubelet/"+name)
	}
	for _, path := range append(must, "/var/lib/k0s/kubelet.conf") {
		if isBelow(path, hidden) == "" {
			t.Errorf("the unit does not hide %s", path)
		}
	}
	rows, _, _ := strings.Cut(table, "\n\n")
	for _, root := range RootDirs {
		if pki := filepath.Join(root, "pki"); isBelow(pki, hidden) == "" && !slices.Contains(words(rows), pki) {
			t.Errorf("neither does the unit hide %s, nor has nodes.md it below \"Directories with keys\"", pki)
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

// The lists have what is in the table of the documentation.
func TestDocumentationNamesEveryKubelet(t *testing.T) {
	_, table, _ := strings.Cut(nodes(t), "\n| node | unit | process | root directory | |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	lists := [][]string{Units, Processes, RootDirs}
	documented := make([][]string, len(lists))
	for row := range strings.Lines(table) {
		for i, cell := range strings.Split(row, "|")[2:5] {
			for n, word := range strings.Split(cell, "`") {
				if n%2 == 1 && !slices.Contains(documented[i], word) {
					documented[i] = append(documented[i], word)
				}
			}
		}
	}
	for i, list := range lists {
		if slices.Sort(documented[i]); !slices.Equal(documented[i], slices.Sorted(slices.Values(list))) {
			t.Errorf("nodes.md has\n%q, the list\n%q", documented[i], list)
		}
	}
}

func nodes(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(top, "packaging/doc/nodes.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// The names are valid for /proc and systemd.
func TestNamesAreValid(t *testing.T) {
	for _, p := range Processes {
		if len(p) > 15 {
			t.Errorf("/proc/PID/comm has at most 15 characters: %s", p)
		}
	}
	for _, path := range RootDirs {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			t.Error(path)
		}
	}
}
