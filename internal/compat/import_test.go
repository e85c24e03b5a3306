package compat

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func manifest(t *testing.T, file string) Manifest {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return Manifest{Name: filepath.Base(file), Data: data}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %d files, %v", pattern, len(files), err)
	}
	return files
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (run with -update and look at the difference). Got:\n%s", file, got)
	}
}

// Each manifest gives the drop-in beside it, and the loader of the daemon reads what was meant.
func TestImport(t *testing.T) {
	for _, file := range glob(t, "testdata/good/*.yaml") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			res := Import([]Manifest{manifest(t, file)}, "")
			var b strings.Builder
			for _, n := range res.Notes {
				fmt.Fprintf(&b, "# note: %s\n", n)
			}
			for _, r := range res.Refused {
				t.Errorf("refused: %+v", r)
			}
			if err := WriteDropIns(&b, res.Registrars); err != nil {
				t.Fatal(err)
			}
			checkLoads(t, res.Registrars, b.String())
			golden(t, strings.TrimSuffix(file, "yaml")+"toml", b.String())
		})
	}
}

func checkLoads(t *testing.T, rs []Registrar, dropIn string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "60-x.toml")
	if err := os.WriteFile(file, []byte(dropIn), 0o600); err != nil {
		t.Fatal(err)
	}
	res := config.Load(config.Source{File: file})
	if len(res.Errors) > 0 {
		t.Fatalf("%v\n%s", res.Errors, dropIn)
	}
	var want []config.Driver
	for _, r := range rs {
		want = append(want, r.Driver)
		if res.Config.Kubelet.RootDir != r.RootDir {
			t.Errorf("loaded root_dir %s, want %s", res.Config.Kubelet.RootDir, r.RootDir)
		}
	}
	if !slices.EqualFunc(res.Config.Drivers, want, config.Driver.Equal) {
		t.Errorf("loaded %+v\nwant   %+v", res.Config.Drivers, want)
	}
}

// What a manifest does not have is refused, with the reason.
func TestRefusals(t *testing.T) {
	var b strings.Builder
	for _, file := range glob(t, "testdata/bad/*.yaml") {
		res := Import([]Manifest{manifest(t, file)}, "")
		if len(res.Refused) == 0 {
			t.Errorf("%s is not refused: %+v", file, res.Registrars)
		}
		for _, r := range res.Refused {
			fmt.Fprintf(&b, "%s: %s\n", r.Where, r.Reason)
			if r.Hint != "" {
				fmt.Fprintf(&b, "    hint: %s\n", r.Hint)
			}
			if strings.ContainsAny(r.Where+r.Reason+r.Hint, "\n\x1b\u202e") {
				t.Errorf("%s: more than one harmless line: %q", file, r)
			}
		}
	}
	golden(t, "testdata/bad/refusals.txt", b.String())
}

func TestNameGivenByHand(t *testing.T) {
	res := Import([]Manifest{manifest(t, "testdata/bad/noname.yaml")}, "mine.example.com")
	if len(res.Refused) > 0 || len(res.Registrars) != 1 || res.Registrars[0].Driver.Name != "mine.example.com" {
		t.Errorf("%+v", res)
	}
	if res := Import([]Manifest{manifest(t, "testdata/bad/noname.yaml")}, "a b"); len(res.Refused) != 1 {
		t.Errorf("a wrong name is taken: %+v", res)
	}
	if res := Import([]Manifest{manifest(t, "testdata/good/ceph.yaml")}, "mine.example.com"); len(res.Refused) == 0 {
		t.Errorf("one name for two drivers is taken: %+v", res)
	}
}

// The CSIDriver object may be in a file of its own.
func TestManyFiles(t *testing.T) {
	driver := Manifest{Name: "driver.yaml", Data: []byte("kind: CSIDriver\nmetadata: {name: x.csi.example.com}\n")}
	res := Import([]Manifest{manifest(t, "testdata/bad/noname.yaml"), driver}, "")
	if len(res.Refused) > 0 || len(res.Registrars) != 1 || res.Registrars[0].Driver.Name != "x.csi.example.com" {
		t.Errorf("%+v", res)
	}
}

// A mount inside of another one counts there; directories whose names only begin alike do not.
func TestDeepestMount(t *testing.T) {
	c := container{VolumeMounts: []volumeMount{
		{Name: "deep", MountPath: "/csi/sockets/"}, {Name: "outer", MountPath: "/csi"}, {Name: "root", MountPath: "/"}, {Name: "alike", MountPath: "/csi/sock"},
	}}
	for file, want := range map[string]string{
		"/csi/sockets/csi.sock": "deep", "/csi/csi.sock": "outer", "/csi/sockets2": "outer", "/csi": "outer", "/run/x": "root",
	} {
		if got := c.mountOf(file).Name; got != want {
			t.Errorf("%s is on %q, want %q", file, got, want)
		}
	}
}

// The default time limit is never shortened.
func TestShortTimeout(t *testing.T) {
	c := container{Args: []string{"--timeout=1s"}}
	if d, err := c.timeout(5 * time.Second); err != nil || d != 5*time.Second {
		t.Errorf("%v, %v", d, err)
	}
	c.Args = []string{"--timeout", "9s", "--timeout=8s"}
	if d, err := c.timeout(5 * time.Second); err != nil || d != 8*time.Second {
		t.Errorf("%v, %v", d, err)
	}
}

// If several names are possible, it is the one that the directory of the socket has.
func TestNameByDirectory(t *testing.T) {
	var w workload
	drivers := []string{"b.example.com", "a.example.com"}
	if name, err := w.driverName("/var/lib/kubelet/plugins/a.example.com/csi.sock", drivers); err != nil || name != "a.example.com" {
		t.Errorf("%q, %v", name, err)
	}
	if name, err := w.driverName("/var/lib/kubelet/plugins/x/csi.sock", drivers); err == nil {
		t.Errorf("guessed %q", name)
	}
}

func FuzzImport(f *testing.F) {
	for _, pattern := range []string{"testdata/good/*.yaml", "testdata/bad/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		res := Import([]Manifest{{Name: "x", Data: data}}, "")
		if len(res.Registrars)+len(res.Refused) == 0 {
			t.Fatal("neither found nor refused")
		}
		for _, r := range res.Refused {
			if text := r.Where + r.Reason + r.Hint; safetext.Clean(text, len(text)) != text {
				t.Fatalf("not harmless: %q", text)
			}
		}
		if len(res.Refused) > 0 {
			return
		}
		var b strings.Builder
		if err := WriteDropIns(&b, res.Registrars); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			if text := strings.TrimSuffix(line, "\n"); safetext.Clean(text, len(text)) != text {
				t.Fatalf("not harmless: %q", text)
			}
		}
		checkLoads(t, res.Registrars, b.String())
		for _, r := range res.Registrars {
			_, file, _ := strings.Cut(b.String(), "# Save this as /etc/csi-registrar/conf.d/60-"+r.Driver.Name)
			if file, _, _ = strings.Cut(file, ","); file != ".toml" || safetext.ShellWord(r.Driver.Name) != r.Driver.Name {
				t.Fatalf("%q is not told as a shell's word", r.Driver.Name)
			}
		}
	})
}
