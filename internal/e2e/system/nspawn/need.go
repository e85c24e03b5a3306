package nspawn

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// Need skips the test with the reason why this machine cannot run it; under CI=true that
// is a failure, lest nobody notices that nothing is tested.
func Need(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal("cannot run here, and under CI it must: " + reason)
	}
	t.Skip("cannot run here: " + reason)
}

// Root makes, or finds in the cache, the root of a Debian suite. Nobody may write to it.
func Root(t testing.TB, suite string) string {
	t.Helper()
	switch {
	case runtime.GOOS != "linux":
		Need(t, "systemd runs on Linux only")
	case os.Geteuid() != 0:
		Need(t, "booting a system in a container needs root")
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		Need(t, "making a Debian root needs Debian's apt-get")
	}
	cmd := exec.Command(filepath.Join(Project(t), "scripts", "nspawn-root"), suite)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("scripts/nspawn-root %s: %v\n%s", suite, err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// Project is the folder of module csi-registrar, above the test's own.
func Project(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "scripts", "nspawn-root")); err == nil {
			return dir
		}
	}
	t.Fatal("cannot find scripts/nspawn-root above the test")
	return ""
}
