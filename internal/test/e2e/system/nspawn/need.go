package nspawn

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
)

// Need skips the test with the reason why this machine cannot run it. Under CI=true that is a
// failure, so that a missing test is noticed.
func Need(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal("cannot run here, and under CI it must: " + reason)
	}
	t.Skip("cannot run here: " + reason)
}

// Root returns the root directory of a Debian suite, from the cache or newly made. It must not be
// written to.
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
	cmd := exec.Command(filepath.Join(built.Root(t), "scripts", "nspawn-root"), suite)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("scripts/nspawn-root %s: %v\n%s", suite, err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}
