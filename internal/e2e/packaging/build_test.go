package packaging

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"csi-registrar/internal/e2e/system/nspawn"
)

// TestReproducible builds the packages from two copies of the source in two folders, at two times,
// and compares the sums of all that comes out.
func TestReproducible(t *testing.T) {
	t.Parallel()
	var sums [][]byte
	for _, name := range []string{"a", "folder-with-a-longer-name"} {
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
		root := nspawn.Project(t)
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
	if n := bytes.Count(sums[0], []byte("\n")); n != 8 {
		t.Errorf("%d files were built, want 8:\n%s", n, sums[0])
	}
	if !bytes.Equal(sums[0], sums[1]) {
		t.Errorf("the builds differ:\n%s\n%s", sums[0], sums[1])
	}
}

// TestLint: lintian, rpmlint and both renderers of man pages say nothing.
func TestLint(t *testing.T) {
	t.Parallel()
	nspawn.Root(t, "trixie") // skips without root on Debian
	made.Store(true)
	dist, err := built()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("scripts/packages-lint", dist)
	cmd.Dir = nspawn.Project(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("scripts/packages-lint: %v\n%s", err, out)
	}
}
