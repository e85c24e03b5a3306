package built

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// module is the part of the output of `go mod edit -json` that is read here.
type module struct {
	Require []struct{ Path, Version string }
	Replace []struct {
		Old, New struct{ Path, Version string }
	}
}

func readModule(t *testing.T, file string) (required, replaced map[string]string) {
	t.Helper()
	out, err := exec.Command("go", "mod", "edit", "-json", file).Output()
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	var m module
	if err := json.Unmarshal(out, &m); err != nil {
		t.Fatal(err)
	}
	required, replaced = map[string]string{}, map[string]string{}
	for _, r := range m.Require {
		required[r.Path] = r.Version
	}
	for _, r := range m.Replace {
		if r.New.Version != "" { // else a directory
			replaced[r.Old.Path] = r.New.Version
		}
	}
	return required, replaced
}

// TestVersionsOfKubernetes compares all places that name a version of Kubernetes.
// scripts/kubernetes changes them together.
func TestVersionsOfKubernetes(t *testing.T) {
	root := Root(t)
	e2e := filepath.Join(root, "internal", "test", "e2e")
	required, replaced := readModule(t, filepath.Join(e2e, "go.mod"))
	version := required["k8s.io/kubernetes"]
	library := strings.Replace(version, "v1.", "v0.", 1)
	if !regexp.MustCompile(`^v1\.\d+\.\d+$`).MatchString(version) {
		t.Fatalf("internal/test/e2e requires Kubernetes %q", version)
	}

	if program, _ := readModule(t, filepath.Join(root, "go.mod")); program["k8s.io/kubelet"] != library {
		t.Errorf("the program requires k8s.io/kubelet %s, want %s", program["k8s.io/kubelet"], library)
	}
	if etcd := required["go.etcd.io/etcd/server/v3"]; etcd != required["go.etcd.io/etcd/client/v3"] {
		t.Errorf("etcd is %s, its client in the API server %s", etcd, required["go.etcd.io/etcd/client/v3"])
	}
	for _, name := range []string{"go.mod", "storage/suite/go.mod"} {
		required, replaced := readModule(t, filepath.Join(e2e, name))
		if v, ok := required["k8s.io/kubernetes"]; ok && v != version {
			t.Errorf("%s requires Kubernetes %s, want %s", name, v, version)
		}
		libraries := 0
		for path, v := range replaced {
			if strings.HasPrefix(path, "k8s.io/") {
				libraries++
				if v != library {
					t.Errorf("%s has %s %s, want %s", name, path, v, library)
				}
			}
		}
		if libraries < 25 {
			t.Errorf("%s replaces %d libraries of Kubernetes", name, libraries)
		}
	}
	_, suite := readModule(t, filepath.Join(e2e, "storage/suite/go.mod"))
	for _, path := range []string{"google.golang.org/grpc", "github.com/container-storage-interface/spec"} {
		if replaced[path] == "" || suite[path] != replaced[path] {
			t.Errorf("%s is %q in internal/test/e2e and %q in storage/suite", path, replaced[path], suite[path])
		}
	}

	_, old := readModule(t, filepath.Join(e2e, "oldkubelet/go.mod"))
	others := submatch(t, filepath.Join(root, "scripts/test.d/kubelets"), `KUBELET_VERSIONS:-([\d.]+)`)
	read(t, filepath.Join(root, "packaging/doc/versions.md"), minor(version)+" |", "("+version+")",
		minor("v"+others)+" |", "(v"+others+")", minor(old["k8s.io/kubernetes"])+" |", "("+old["k8s.io/kubernetes"]+")")
	read(t, filepath.Join(e2e, "storage/README.md"), "Kubernetes "+version[1:])
}

// minor returns the minor version, such as 1.37.
func minor(version string) string { return version[1:strings.LastIndex(version, ".")] }

func read(t *testing.T, path string, want ...string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range want {
		if !strings.Contains(string(b), w) {
			t.Errorf("%s does not name %s", path, w)
		}
	}
}

func submatch(t *testing.T, path, pattern string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(pattern).FindStringSubmatch(string(b))
	if m == nil {
		t.Fatalf("%s has nothing like %s", path, pattern)
	}
	return m[1]
}
