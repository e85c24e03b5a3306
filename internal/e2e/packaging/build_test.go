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

// TestPackagesHoldWhatMakeBuilds: the programs in the packages and in the system extension are
// byte for byte those that `make build` makes and that every test runs.
func TestPackagesHoldWhatMakeBuilds(t *testing.T) {
	t.Parallel()
	m := nspawn.New(t, "trixie") // has dpkg and rpm; it stays off
	dist := t.TempDir()
	run := func(script string, env ...string) {
		t.Helper()
		cmd := exec.Command(script)
		cmd.Dir = built.Root(t)
		cmd.Env = append(os.Environ(), append(env, "DIST="+dist)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
	same := func(kind, packed, shipped string) {
		t.Helper()
		got, want := sum(t, packed), sum(t, shipped)
		if got != want {
			t.Errorf("%s: sha256 %x in the %s, %x of %s", filepath.Base(shipped), got, kind, want, shipped)
		}
		t.Logf("%s of the %s: sha256 %x", filepath.Base(shipped), kind, got)
	}
	run("scripts/packages", "ARCHS="+runtime.GOARCH)
	programs := []string{built.Registrar(t), built.SampleDriver(t)}
	for kind, unpack := range map[string]string{"deb": "dpkg-deb -x /opt/package /", "rpm": "rpm -i --nodeps --noscripts /opt/package"} {
		for _, program := range programs {
			name := filepath.Base(program)
			b, err := os.ReadFile(only(t, filepath.Join(dist, name+"?[0-9]*."+kind)))
			if err != nil {
				t.Fatal(err)
			}
			m.Write("/opt/package", string(b))
			m.Chroot("sh", "-ec", "rm -f /usr/bin/"+name+"; "+unpack)
			same(kind, m.Path("/usr/bin/"+name), program)
		}
	}
	squashfsTools(t)
	run("scripts/sysext")
	same("system extension", filepath.Join(unsquash(t, only(t, dist+"/*.raw")), "usr/bin/csi-registrar"), programs[0])
}

// only is the one file of that pattern.
func only(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %q %v", pattern, found, err)
	}
	return found[0]
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
