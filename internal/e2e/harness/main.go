// Package harness builds nodes for tests: csi-registrar's binary as a daemon, CSI drivers
// that do as they are told, kubelets (package kubelet) and a stand-in of the sidecar, all
// in folders of one test, and waits for what should happen without sleeping. At the end
// of each test it looks for what was left behind.
package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"csi-registrar/internal/e2e/kubelet"
)

// role is the environment variable that makes a test binary another program: each
// kubelet and each driver that is killed needs a process of its own.
const role = "CSI_E2E_ROLE"

// Main is the TestMain of every package that uses the harness.
func Main(m *testing.M) {
	switch os.Getenv(role) {
	case "kubelet":
		os.Exit(kubelet.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	case "driver":
		os.Exit(driverMain(os.Args[1:]))
	}
	code := m.Run()
	if built.dir != "" {
		if err := os.RemoveAll(built.dir); err != nil {
			fmt.Fprintln(os.Stderr, "cannot remove the built binary:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// reexec is a command that runs this very binary in a role.
func reexec(t testing.TB, as string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), role+"="+as)
	return cmd
}

// built is the binary under test, one for all tests of a process.
var built struct {
	once sync.Once
	dir  string
	path string
	err  error
}

// Binary is the program under test: the file that CSI_REGISTRAR_BIN names, else it is
// built with the flags of the Makefile.
func Binary(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("CSI_REGISTRAR_BIN"); path != "" {
		abs, err := filepath.Abs(path)
		if err != nil {
			t.Fatal(err)
		}
		return abs
	}
	built.once.Do(func() {
		root, err := moduleRoot()
		if err != nil {
			built.err = err
			return
		}
		if built.dir, built.err = os.MkdirTemp("", "csi-e2e-bin"); built.err != nil {
			return
		}
		built.path = filepath.Join(built.dir, "csi-registrar")
		cmd := exec.Command("go", "build", "-tags=grpcnotrace,nethttpomithttp2", "-gcflags=all=-l", "-ldflags=-s -w", "-o", built.path, "./cmd/csi-registrar")
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("cannot build csi-registrar: %w\n%s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.path
}

// moduleRoot finds the folder of module csi-registrar above the test's own.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "cmd", "csi-registrar", "main.go")); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", fmt.Errorf("cannot find cmd/csi-registrar above the test; set CSI_REGISTRAR_BIN to a built binary")
		}
		dir = up
	}
}
