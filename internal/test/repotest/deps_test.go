package repotest

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// maxBinary is the largest size in bytes of the packaged program.
const maxBinary = 16 << 20

// TestImports compares the imports between packages with the table in ARCHITECTURE.md.
func TestImports(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(top, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	allowed := importTable(string(text))
	if len(allowed) < 10 {
		t.Fatalf("the table of ARCHITECTURE.md cannot be read: %v", allowed)
	}
	seen := map[string]bool{}
	for _, p := range list(t, "./cmd/...", "./internal/...") {
		from := packageOf(p.ImportPath)
		may, listed := allowed[from]
		if !listed {
			t.Errorf("ARCHITECTURE.md does not have %s", p.ImportPath)
			continue
		}
		seen[from] = true
		for _, to := range p.Imports {
			to = packageOf(to)
			if to != "" && to != from && !slices.Contains(may, to) && !slices.Contains(may, "everything") {
				t.Errorf("%s imports %s: not allowed by ARCHITECTURE.md", p.ImportPath, to)
			}
		}
	}
	for from := range allowed {
		if !seen[from] && from != "e2e" {
			t.Errorf("ARCHITECTURE.md has %s, which is not there", from)
		}
	}
}

// packageOf returns the package of an import path: cmd/NAME, or the first element below internal;
// empty for packages of other modules. A nested package counts as its parent.
func packageOf(path string) string {
	if rest, ours := strings.CutPrefix(path, "csi-registrar/cmd/"); ours {
		return "cmd/" + rest
	}
	rest, ours := strings.CutPrefix(path, "csi-registrar/internal/")
	if !ours {
		return ""
	}
	first, _, _ := strings.Cut(rest, "/")
	return first
}

// importTable parses the table "package | what it is for | may import".
func importTable(text string) map[string][]string {
	out := map[string][]string{}
	_, text, _ = strings.Cut(text, "| package | what it is for | may import |\n")
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 3 {
			break
		}
		name := strings.Trim(strings.TrimSpace(cells[0]), "`")
		if strings.HasPrefix(name, "--") {
			continue
		}
		var may []string
		for to := range strings.SplitSeq(cells[2], ",") {
			may = append(may, strings.TrimSpace(to))
		}
		out[strings.TrimPrefix(name, "internal/")] = may
	}
	return out
}

type listed struct {
	ImportPath string
	Imports    []string
	Module     *struct {
		Path string
		Main bool
	}
}

// list returns the output of go list.
func list(t *testing.T, args ...string) []listed {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json=ImportPath,Imports,Module", "-tags", "grpcnotrace,nethttpomithttp2"}, args...)...)
	cmd.Dir = top
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	var all []listed
	dec := json.NewDecoder(bytes.NewReader(out))
	for {
		var p listed
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// TestLinked makes a new module, or a package that is known to make the binary large, a deliberate
// decision.
func TestLinked(t *testing.T) {
	var modules []string
	for _, p := range list(t, "-deps", "./cmd/csi-registrar") {
		switch p.ImportPath {
		// These look up methods by name, so the linker keeps all exported ones.
		case "html/template", "text/template",
			"expvar", // a handler that registers itself
			"golang.org/x/net/trace", "google.golang.org/grpc/channelz/service", "google.golang.org/grpc/reflection",
			"testing", "net/rpc", "plugin", "C", "runtime/cgo",
			"github.com/prometheus/client_golang/prometheus":
			t.Errorf("%s is linked", p.ImportPath)
		}
		if p.Module != nil && !p.Module.Main && !slices.Contains(modules, p.Module.Path) {
			modules = append(modules, p.Module.Path)
		}
	}
	slices.Sort(modules)
	want := []string{
		"github.com/BurntSushi/toml",
		"github.com/container-storage-interface/spec",
		"github.com/coreos/go-systemd/v22",
		"github.com/godbus/dbus/v5",
		"github.com/landlock-lsm/go-landlock", // applies Landlock to all threads of a Go program
		"github.com/pelletier/go-toml/v2",
		"go.yaml.in/yaml/v3",
		"golang.org/x/net",
		"golang.org/x/sys",
		"golang.org/x/text",
		"google.golang.org/genproto/googleapis/rpc",
		"google.golang.org/grpc",
		"google.golang.org/protobuf",
		"k8s.io/kubelet",
		"kernel.org/pub/linux/libs/security/libcap/psx", // of go-landlock, before Linux 7.0
	}
	if !slices.Equal(modules, want) {
		t.Errorf("linked modules:\n%s\nwant\n%s", strings.Join(modules, "\n"), strings.Join(want, "\n"))
	}
}

// TestBinary checks that the shipped binary is within its budget and static, and that nothing looks
// up methods by a name that the linker does not know, which would keep every exported method of
// every type.
func TestBinary(t *testing.T) {
	out, log := program(t)
	if !strings.Contains(log, " -> ") {
		t.Fatal("the linker does not print what depends on what")
	}
	for line := range strings.Lines(log) {
		if strings.Contains(line, "<ReflectMethod>") {
			t.Errorf("turns off the linker's pruning of methods: %s", line)
		}
	}
	fi, err := os.Stat(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%.2f MB", float64(fi.Size())/1e6)
	if fi.Size() > maxBinary {
		t.Errorf("the binary has %d bytes, at most %d are allowed", fi.Size(), maxBinary)
	}
	f, err := elf.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("not static: it has %s", p.Type)
		}
	}
	checkBuildInfo(t, out)
}

// checkBuildInfo checks that the shipped program reports what it was built from.
func checkBuildInfo(t *testing.T, binary string) {
	t.Helper()
	doc, err := exec.CommandContext(t.Context(), binary, "version", "--json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var b struct {
		Version, Commit string
		Modules         []struct{ Path, Version, Sum string }
	}
	if err := json.Unmarshal(doc, &b); err != nil {
		t.Fatalf("version --json: %v\n%s", err, doc)
	}
	for script, got := range map[string]string{"version": b.Version, "commit": b.Commit} {
		cmd := exec.CommandContext(t.Context(), filepath.Join("scripts", script))
		cmd.Dir = top
		if want, err := cmd.Output(); err != nil || strings.TrimSpace(string(want)) != got {
			t.Errorf("version --json: %s %q, want %q (%v)", script, got, want, err)
		}
	}
	sums, err := os.ReadFile(filepath.Join(top, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	grpc := false
	for _, m := range b.Modules {
		grpc = grpc || m.Path == "google.golang.org/grpc"
		if !bytes.Contains(sums, []byte(m.Path+" "+m.Version+" "+m.Sum+"\n")) {
			t.Errorf("version --json: module %+v is not in go.sum", m)
		}
	}
	if !grpc {
		t.Errorf("version --json: the modules are %+v, want grpc among them", b.Modules)
	}
}
