// Package system boots real systemds (247, 252, 257) with the shipped units, the sample
// driver and the kubelet's own registration code, and says what the kubelet must see
// when all kinds of things happen to the daemon.
package system

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"csi-registrar/internal/e2e/system/nspawn"
)

// suites are Debian 11, 12 and 13: systemd 247, 252 and 257.
var suites = []string{"bullseye", "bookworm", "trixie"}

// onEach runs a test on each suite, side by side.
func onEach(t *testing.T, test func(t *testing.T, suite string)) {
	for _, suite := range suites {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			test(t, suite)
		})
	}
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		if err := os.RemoveAll(built.dir); err != nil {
			fmt.Fprintln(os.Stderr, "cannot remove the built binaries:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// built are the binaries under test, made once for all tests of a process.
var built struct {
	once      sync.Once
	dir       string
	registrar string
	err       error
}

// binaries returns the folder that holds "kubelet", and the path of csi-registrar: the
// file that CSI_REGISTRAR_BIN names, else it is built as `make build` does.
func binaries(t testing.TB) (dir, registrar string) {
	t.Helper()
	project := nspawn.Project(t)
	built.once.Do(func() { built.err = build(project) })
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.dir, built.registrar
}

func build(project string) (err error) {
	if built.dir, err = os.MkdirTemp("", "csi-system-bin"); err != nil {
		return err
	}
	// Static, for the oldest suite's C library is older than this machine's.
	if err := goBuild(filepath.Join(project, "internal", "e2e"), filepath.Join(built.dir, "kubelet"), "./cmd/kubelet"); err != nil {
		return err
	}
	if path := os.Getenv("CSI_REGISTRAR_BIN"); path != "" {
		built.registrar, err = filepath.Abs(path)
		return err
	}
	built.registrar = filepath.Join(built.dir, "csi-registrar")
	return goBuild(project, built.registrar, "./cmd/csi-registrar")
}

func goBuild(module, out, what string) error {
	cmd := exec.Command("go", "build", "-tags=grpcnotrace", "-ldflags=-s -w", "-o", out, what)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build %s: %w\n%s", what, err, text)
	}
	return nil
}
