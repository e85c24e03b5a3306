package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// kubeletFiles creates the root directory of a kubelet with a volume of a.csi.example that is
// staged, and published to two pods.
func kubeletFiles(t *testing.T, root string) (kubelet string) {
	t.Helper()
	kubelet = filepath.Join(root, "kubelet")
	for _, dir := range []string{
		"plugins/kubernetes.io/csi/a.csi.example/0123", "pods/p1/volumes/kubernetes.io~csi/pv", "pods/p2/volumes/kubernetes.io~csi/pv",
	} {
		dir = filepath.Join(kubelet, dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "vol_data.json"), []byte(`{"driverName":"a.csi.example","volumeHandle":"v"}`), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return kubelet
}

// status shows the drivers' states even if the kubelet's files cannot be read.
func TestStatusOnAHangingFileSystem(t *testing.T) {
	root := fake.ShortDir(t)
	kubelet := filepath.Join(root, "kubelet")
	if err := os.Mkdir(kubelet, 0o755); err != nil {
		t.Fatal(err)
	}
	h, err := fake.MountHangFS(kubelet)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.Hang(); err != nil {
		t.Fatal(err)
	}
	d := newFake(driverIn("a.csi.example", "registered", hour))
	d.status.PluginsRegistry = filepath.Join(kubelet, "plugins_registry")
	d.serve(t, root)
	s := newSession()
	start := time.Now()
	code := s.run(t.Context(), "status", "--config-root", root)
	want := "the volumes in use are not known: the file system of " + kubelet + " does not answer"
	if out := strings.Join(strings.Fields(s.stdout.String()), " "); code != 0 || !strings.Contains(out, "a.csi.example registered") || !strings.Contains(out, want) {
		t.Errorf("exit code %d after %s: %s", code, time.Since(start), out)
	}
}
