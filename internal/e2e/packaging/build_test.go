package packaging

import (
	"bytes"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"csi-registrar/internal/e2e/built"
	"csi-registrar/internal/e2e/system/nspawn"
)

// TestReproducible builds the packages from two copies of the source in two directories, at two times,
// and compares the sums of all that comes out.
func TestReproducible(t *testing.T) {
	t.Parallel()
	var sums [][]byte
	for _, name := range []string{"a", "directory-with-a-longer-name"} {
		dir := filepath.Join(t.TempDir(), name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		run := func(env []string, args ...string) {
			t.Helper()
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), env...)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%q: %v\n%s", args, err, out)
			}
		}
		root := built.Root(t)
		for _, part := range []string{"cmd", "internal", "packaging", "systemd", "scripts", "go.mod", "go.sum", "README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"} {
			run(nil, "cp", "-r", filepath.Join(root, part), ".")
		}
		run([]string{"SOURCE_DATE_EPOCH=1700000000", "ARCHS=amd64,arm64"}, "scripts/packages")
		b, err := os.ReadFile(filepath.Join(dir, "dist", "SHA256SUMS"))
		if err != nil {
			t.Fatal(err)
		}
		sums = append(sums, b)
	}
	if n := bytes.Count(sums[0], []byte("\n")); n != 12 {
		t.Errorf("%d files were built, want 12:\n%s", n, sums[0])
	}
	if !bytes.Equal(sums[0], sums[1]) {
		t.Errorf("the builds differ:\n%s\n%s", sums[0], sums[1])
	}
}

// TestPackagesHoldWhatMakeBuilds: the programs in the packages
// are byte for byte those that `make build` makes and that every test runs.
func TestPackagesHoldWhatMakeBuilds(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		nspawn.Need(t, "dpkg-deb is not here")
	}
	dist, dir := t.TempDir(), t.TempDir()
	cmd := exec.Command("scripts/packages")
	cmd.Dir = built.Root(t)
	cmd.Env = append(os.Environ(), "DIST="+dist, "FORMATS=deb", "ARCHS="+runtime.GOARCH)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("scripts/packages: %v\n%s", err, out)
	}
	for name, want := range map[string]string{"csi-registrar": built.Registrar(t), "csi-sample-driver": built.SampleDriver(t)} {
		debs, err := filepath.Glob(filepath.Join(dist, name+"_*.deb"))
		if err != nil || len(debs) != 1 {
			t.Fatalf("packages of %s: %q %v", name, debs, err)
		}
		if out, err := exec.Command("dpkg-deb", "-x", debs[0], filepath.Join(dir, name)).CombinedOutput(); err != nil {
			t.Fatalf("dpkg-deb -x %s: %v\n%s", debs[0], err, out)
		}
		if packed, made := sum(t, filepath.Join(dir, name, "usr", "bin", name)), sum(t, want); packed != made {
			t.Errorf("%s: sha256 %x in the package, %x of %s", name, packed, made, want)
		}
	}
}

func sum(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(b)
}

// TestLint: lintian, rpmlint and both renderers of man pages say nothing.
func TestLint(t *testing.T) {
	t.Parallel()
	nspawn.Root(t, "trixie") // skips without root on Debian
	made.Store(true)
	dist, err := packages()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("scripts/packages-lint", dist)
	cmd.Dir = built.Root(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("scripts/packages-lint: %v\n%s", err, out)
	}
}
