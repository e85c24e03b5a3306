// Package harness builds nodes for tests: csi-registrar's binary as a daemon, fake CSI drivers,
// kubelets (package kubelet) and a fake sidecar, all below one directory per test. It has functions
// that wait for events and conditions, and checks at the end of each test that nothing was left
// behind.
package harness

import (
	"os"
	"os/exec"
	"testing"

	"csi-registrar/internal/test/e2e/kubelet"
)

// role is the environment variable that turns a test binary into another program: each kubelet and
// each driver that is killed needs a process of its own.
const role = "CSI_E2E_ROLE"

// Main is the TestMain of every package that uses the harness.
func Main(m *testing.M) {
	switch os.Getenv(role) {
	case "kubelet":
		os.Exit(kubelet.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	case "driver":
		os.Exit(driverMain(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// reexec returns a command that runs the test binary in a role.
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
