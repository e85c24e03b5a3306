// Package system boots real systemds (247, 252, 257; 262 nightly) with the shipped units, the
// sample driver and the kubelet's own registration code, and checks what the kubelet sees when the
// daemon is stopped, restarted, killed or upgraded.
package system

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"csi-registrar/internal/test/e2e/built"
)

// chosen are the suites of Debian in SUITES; empty: each test has its own.
var chosen = strings.Fields(os.Getenv("SUITES"))

// main is Debian 12 with systemd 252.
const main = "bookworm"

// onEach runs a test on Debian 11, 12 and 13 with systemd 247, 252 and 257, in parallel with each
// other and with other tests: units, sandbox, stop and restart, which differ.
func onEach(t *testing.T, test func(t *testing.T, suite string)) {
	onSuites(t, test, "bullseye", main, "trixie")
}

// onMain runs a test on systemd 252; the others have it nightly, by SUITES.
func onMain(t *testing.T, test func(t *testing.T, suite string)) { onSuites(t, test, main) }

func onSuites(t *testing.T, test func(t *testing.T, suite string), suites ...string) {
	t.Parallel()
	if len(chosen) > 0 {
		suites = chosen
	}
	for _, suite := range suites {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			test(t, suite)
		})
	}
}

func TestMain(m *testing.M) {
	code := m.Run()
	if kubelet.dir != "" {
		if err := os.RemoveAll(kubelet.dir); err != nil {
			fmt.Fprintln(os.Stderr, "cannot remove the built kubelet:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// kubelet is built once for all tests of a process.
var kubelet struct {
	once sync.Once
	dir  string
	err  error
}

// kubeletDir returns the directory that contains "kubelet".
func kubeletDir(t testing.TB) string {
	t.Helper()
	root := built.Root(t)
	kubelet.once.Do(func() {
		if kubelet.dir, kubelet.err = os.MkdirTemp("", "csi-system-bin"); kubelet.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", filepath.Join(kubelet.dir, "kubelet"), "./cmd/kubelet")
		cmd.Dir = filepath.Join(root, "internal", "test", "e2e")
		// Static, because the oldest suite's C library is older than this machine's.
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			kubelet.err = fmt.Errorf("cannot build the kubelet: %w\n%s", err, out)
		}
	})
	if kubelet.err != nil {
		t.Fatal(kubelet.err)
	}
	return kubelet.dir
}
