package cli

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/safetext"
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
	rootDirFile(t, root, kubelet)
	return kubelet
}

// rootDirFile writes a configuration with the kubelet's root directory.
func rootDirFile(t *testing.T, root, kubelet string) {
	t.Helper()
	file := filepath.Join(root, "etc/csi-registrar/config.toml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, fmt.Appendf(nil, "[kubelet]\nroot_dir = %q\n", kubelet), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// Volumes of a driver that nobody registers are an error of status, also without any driver.
func TestStatusWithVolumesOfNobody(t *testing.T) {
	root := fake.ShortDir(t)
	kubelet := kubeletFiles(t, root)
	registry := filepath.Join(kubelet, "plugins_registry")
	d := newFake()
	d.status.PluginsRegistry = safetext.Claim(registry)
	d.serve(t, root)
	status := func() (int, string) {
		s := newSession()
		code := s.run(t.Context(), "status", "--config-root", root)
		return code, strings.Join(strings.Fields(s.stdout.String()), " ")
	}
	const want = " 2 volumes of a.csi.example in use, and nobody registers the driver: csi-registrar doctor"
	if code, out := status(); code != exitFailed || !strings.HasSuffix(out, want) || !strings.HasPrefix(out, "No drivers are configured") {
		t.Errorf("exit code %d: %s", code, out)
	}
	// A sidecar registers it.
	if err := os.MkdirAll(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: filepath.Join(registry, "a.csi.example-reg.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if code, out := status(); code != 0 || strings.Contains(out, "volumes") {
		t.Errorf("exit code %d: %s", code, out)
	}
	// The sidecar is killed, and leaves its socket.
	ln.SetUnlinkOnClose(false)
	ln.Close()
	if code, out := status(); code != exitFailed || !strings.HasSuffix(out, want) {
		t.Errorf("exit code %d: %s", code, out)
	}
}

// A volume whose driver nobody knows hides no other: status names its file, and fails as without
// it.
func TestStatusWithAVolumeOfAnUnknownDriver(t *testing.T) {
	root := fake.ShortDir(t)
	kubelet := kubeletFiles(t, root)
	dir := filepath.Join(kubelet, "pods/p3/volumes/kubernetes.io~csi/pv")
	if err := errors.Join(os.MkdirAll(dir+"/mount", 0o755), os.WriteFile(dir+"/vol_data.json", nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", dir+"/mount", "tmpfs", 0, ""); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir+"/mount", 0); err != nil {
			t.Error(err)
		}
	})
	d := newFake()
	d.status.PluginsRegistry = safetext.Claim(filepath.Join(kubelet, "plugins_registry"))
	d.serve(t, root)
	s := newSession()
	code := s.run(t.Context(), "status", "--config-root", root)
	out := strings.Join(strings.Fields(s.stdout.String()), " ")
	for _, want := range []string{"2 volumes of a.csi.example in use, and nobody registers the driver", "not known: cannot read the volumes: \"" + dir + "/vol_data.json\" names no driver"} {
		if code != exitFailed || !strings.Contains(out, want) {
			t.Errorf("exit code %d: %s", code, out)
		}
	}
}

// status shows the drivers' states even if the kubelet's files cannot be read.
func TestStatusOnAHangingFileSystem(t *testing.T) {
	t.Parallel() // it mostly waits
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
	rootDirFile(t, root, kubelet)
	d.status.PluginsRegistry = safetext.Claim(filepath.Join(kubelet, "plugins_registry"))
	d.serve(t, root)
	s := newSession()
	start := time.Now()
	code := s.run(t.Context(), "status", "--config-root", root)
	want := "the volumes in use are not known: the file system of " + kubelet + " does not answer"
	if out := strings.Join(strings.Fields(s.stdout.String()), " "); code != 0 || !strings.Contains(out, "a.csi.example registered") || !strings.Contains(out, want) {
		t.Errorf("exit code %d after %s: %s", code, time.Since(start), out)
	}
}
