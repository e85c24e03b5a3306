package packaging

import (
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// TestPackagesHoldWhatMakeBuilds checks that the programs in the packages and in the system
// extension are identical to those of `make build`, which every test runs.
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

// only returns the only file that matches the pattern.
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

// TestLint checks that lintian and rpmlint report nothing.
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
