package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"csi-registrar/internal/e2e/built"
	"csi-registrar/internal/e2e/system/nspawn"
)

// TestSysext boots Debian 13 with a read-only /usr, nothing in /etc and /var, and the
// system extension. A container has no loop devices, so the image is unpacked into the directory that
// systemd-sysext takes as well.
func TestSysext(t *testing.T) {
	n := newNode(t, "trixie")
	squashfsTools(t)
	dir := t.TempDir()
	build := exec.Command("scripts/sysext")
	build.Dir = built.Root(t)
	build.Env = append(os.Environ(), "DIST="+dir)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("scripts/sysext: %v\n%s", err, out)
	}
	extension := unsquash(t, only(t, dir+"/*.raw"))
	if _, err := os.Stat(extension + "/etc"); err == nil {
		t.Error("the image has an /etc")
	}
	// What the image's owner adds: a kubelet, a driver. Its links are in /usr: there is no /etc.
	n.copyIn(filepath.Join(n.dist, "kubelet"), "/usr/bin/test-kubelet", 0o755)
	n.Write("/usr/lib/systemd/system/kubelet.service", `[Service]
ExecStart=/usr/bin/test-kubelet --root /var/lib/kubelet --handler record
StandardOutput=append:/run/events
StandardError=null
`)
	n.copyIn(built.SampleDriver(t), "/usr/bin/csi-sample-driver", 0o755)
	n.Write("/usr/lib/systemd/system/csi-sample-driver.service", read(t, "../../../packaging/example/csi-sample-driver.service"))
	n.Write("/usr/lib/csi-registrar/conf.d/20-sample.toml", read(t, "../../../packaging/example/20-sample.toml"))
	for _, unit := range []string{"kubelet.service", "csi-sample-driver.service"} {
		link := n.Disk + "/usr/lib/systemd/system/multi-user.target.wants/" + unit
		if err := os.Symlink("../"+unit, link); err != nil {
			t.Fatal(err)
		}
	}
	n.Args = append(n.Args, "--volatile=yes", "--bind-ro="+extension+":/run/extensions/csi-registrar")
	n.Boot()
	if out, err := n.Try("touch", "/usr/x"); err == nil {
		t.Fatalf("/usr is not read-only: %s", out)
	}
	n.Run("csi-registrar", "wait", "--timeout", "30s", driver)
	n.Run("systemctl", "is-active", "csi-registrar.service")
	n.Run("test", "!", "-e", "/etc/csi-registrar")
}

// squashfsTools makes sure that mksquashfs and unsquashfs are here.
func squashfsTools(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("unsquashfs"); err != nil {
		install := exec.Command("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "install", "--no-install-recommends", "squashfs-tools")
		install.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := install.CombinedOutput(); err != nil {
			nspawn.Need(t, "apt-get cannot install squashfs-tools: "+string(out))
		}
	}
}

// unsquash unpacks an image.
func unsquash(t *testing.T, image string) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "csi-registrar")
	if out, err := exec.Command("unsquashfs", "-q", "-n", "-d", dir, image).CombinedOutput(); err != nil {
		t.Fatalf("unsquashfs: %v\n%s", err, out)
	}
	return dir
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
