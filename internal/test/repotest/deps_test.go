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

// TestWings checks that each package is in a wing of ARCHITECTURE.md, and that imports between
// wings follow its table.
func TestWings(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(top, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	wings := wingTable(string(text))
	if len(wings) < 6 {
		t.Fatalf("the table of ARCHITECTURE.md cannot be read: %v", wings)
	}
	seen := map[string]bool{}
	for _, p := range list(t, "./cmd/...", "./internal/...") {
		from, name := wingOf(p.ImportPath)
		wing, ok := wings[from]
		switch {
		case from == "cmd" || name == "":
			continue
		case !ok || len(wing.packages) > 0 && !slices.Contains(wing.packages, name):
			t.Errorf("ARCHITECTURE.md does not have %s", p.ImportPath)
			continue
		}
		seen[from+"/"+name] = true
		for _, imported := range p.Imports {
			to, _ := wingOf(imported)
			if to != "" && to != from && !slices.Contains(wing.imports, to) && !slices.Contains(wing.imports, "all") {
				t.Errorf("%s imports %s: not allowed by ARCHITECTURE.md", p.ImportPath, imported)
			}
		}
	}
	for name, wing := range wings {
		for _, p := range wing.packages {
			if p != "e2e" && !seen[name+"/"+p] { // e2e has its own modules
				t.Errorf("ARCHITECTURE.md has %s/%s, which is not there", name, p)
			}
		}
	}
}

// wingOf returns the wing of an import path, which is the first element below internal, or cmd, and
// the package in it; the wing is empty for packages of other modules. daemon and cli have no other
// packages: they are named after themselves.
func wingOf(path string) (wing, name string) {
	rest, ours := strings.CutPrefix(path, "csi-registrar/")
	if !ours {
		return "", ""
	}
	rest = strings.TrimPrefix(rest, "internal/")
	wing, name, nested := strings.Cut(rest, "/")
	if !nested && (wing == "daemon" || wing == "cli") {
		return wing, wing
	}
	name, _, _ = strings.Cut(name, "/")
	return wing, name
}

type wing struct{ packages, imports []string }

// wingTable parses the table "wing | what belongs there | packages | may import".
func wingTable(text string) map[string]wing {
	out := map[string]wing{}
	_, text, _ = strings.Cut(text, "| wing | what belongs there | packages | may import |\n")
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 4 {
			break
		}
		if strings.HasPrefix(cells[0], "--") {
			continue
		}
		for name := range strings.SplitSeq(cells[0], ",") {
			name = strings.Trim(name, " `")
			out[name] = wing{append(out[name].packages, strings.Fields(cells[2])...), strings.Fields(cells[3])}
		}
	}
	return out
}

type listed struct {
	ImportPath string
	Imports    []string
	Module     *struct {
		Path, Version string
		Main          bool
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
	spec := read(t, "packaging/rpm/csi-registrar.spec")
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
			version := strings.ReplaceAll(strings.TrimPrefix(p.Module.Version, "v"), "-", "~")
			if line := "bundled(golang(" + p.Module.Path + ")) = " + version + "\n"; !strings.Contains(spec, line) {
				t.Errorf("csi-registrar.spec does not have %q", line)
			}
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
	if strings.Count(spec, "bundled(") != len(modules) {
		t.Errorf("csi-registrar.spec has %d bundled modules, want %d", strings.Count(spec, "bundled("), len(modules))
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
