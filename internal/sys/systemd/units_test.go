package systemd

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// unitSettings reads a unit file, or a drop-in, into its settings: all values of a key, in order.
func unitSettings(t *testing.T, path string) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "systemd", path))
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok && !strings.HasPrefix(key, "#") {
			settings[key] = append(settings[key], value)
		}
	}
	return settings
}

// TestUnitSettingsHaveAnEffect: a setting that does nothing looks like protection.
func TestUnitSettingsHaveAnEffect(t *testing.T) {
	for _, path := range []string{
		"csi-registrar.service", "csi-registrar.socket", "csi-registrar-http.socket", "csi-registrar-sweep.service",
		"csi-registrar-wait.service", "csi-registrar-wait@.service", "csi-registrar-.service.d/sandbox.conf",
	} {
		settings := unitSettings(t, path)
		if settings["RemoveIPC"] != nil && settings["User"] == nil {
			t.Errorf("%s: RemoveIPC= has no effect without User=", path)
		}
		if settings["DevicePolicy"] != nil && slices.Equal(settings["PrivateDevices"], []string{"yes"}) {
			t.Errorf("%s: PrivateDevices= implies DevicePolicy=", path)
		}
	}
}

// TestSocketHasTheSandboxOfTheSideUnits: systemd reads no [Service] section for a socket, so its
// sandbox is written a second time.
func TestSocketHasTheSandboxOfTheSideUnits(t *testing.T) {
	want := unitSettings(t, "csi-registrar-.service.d/sandbox.conf")
	got := unitSettings(t, "csi-registrar.socket")
	if len(want) < 20 {
		t.Fatalf("the drop-in has %d settings only", len(want))
	}
	// The socket itself is in these namespaces and filters too, and a memory limit kills nothing
	// here.
	for _, key := range []string{"PrivateNetwork", "IPAddressDeny", "MemoryMax", "UMask"} {
		delete(want, key)
	}
	for key, values := range want {
		if !slices.Equal(got[key], values) {
			t.Errorf("csi-registrar.socket has %s=%q, the drop-in %q", key, got[key], values)
		}
	}
}
