package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// TestSysext boots Debian 13 with a read-only /usr, empty /etc and /var, and the system extension.
// A container has no loop devices, so the image is unpacked into a directory, which systemd-sysext
// also accepts.
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
	// Files of the image's owner: a kubelet and a driver. Its links are in /usr, because /etc is
	// empty.
	n.copyIn(filepath.Join(n.dist, "kubelet"), "/usr/bin/test-kubelet", 0o755)
	n.Write("/usr/lib/systemd/system/kubelet.service", `[Service]
ExecStart=/usr/bin/test-kubelet --root /var/lib/kubelet --handler record
StandardOutput=append:/run/events
StandardError=null
`)
	n.copyIn(built.SampleDriver(t), "/usr/bin/csi-sample-driver", 0o755)
	n.Write("/usr/lib/systemd/system/csi-sample-driver.service", read(t, "../../../../packaging/examples/sample/csi-sample-driver.service"))
	n.Write("/usr/lib/csi-registrar/conf.d/20-sample.toml", read(t, "../../../../packaging/examples/sample/20-sample.toml"))
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
	n.Run("csi-registrar", "wait", "--timeout", "55s", driver)
	n.Run("systemctl", "is-active", "csi-registrar.service")
	n.Run("test", "!", "-e", "/etc/csi-registrar")
}

// TestSysextIsUpdated replaces the system extension by a newer one on a running node: systemd 262
// restarts the service after `systemd-sysext refresh`, and the kubelet sees nothing. It is for
// suite newsystem, which sets SUITES to a Debian release with that systemd.
func TestSysextIsUpdated(t *testing.T) {
	suite := os.Getenv("SUITES")
	if suite == "" {
		t.Skip("SUITES names no Debian with systemd 262")
	}
	n := newNode(t, suite)
	squashfsTools(t)
	for version, dir := range map[string]string{"0.1.98": "/var/lib/extensions/csi-registrar", newer: "/opt/newer"} {
		dist := t.TempDir()
		build := exec.Command("scripts/sysext")
		build.Dir = built.Root(t)
		build.Env = append(os.Environ(), "DIST="+dist, "VERSION="+version)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("scripts/sysext: %v\n%s", err, out)
		}
		script := `mkdir -p "$(dirname "$1")" && cp -a "$0" "$1"`
		if out, err := exec.Command("sh", "-c", script, unsquash(t, only(t, dist+"/*.raw")), n.Disk+dir).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	n.Write("/usr/lib/systemd/system/kubelet.service", `[Service]
ExecStart=/opt/kubelet --root /var/lib/kubelet
StandardOutput=append:/opt/events
StandardError=null
[Install]
WantedBy=multi-user.target
`)
	n.copyIn(built.SampleDriver(t), "/usr/bin/csi-sample-driver", 0o755)
	n.Write("/usr/lib/systemd/system/csi-sample-driver.service", read(t, "../../../../packaging/examples/sample/csi-sample-driver.service"))
	n.Write("/etc/csi-registrar/conf.d/20-sample.toml", read(t, "../../../../packaging/examples/sample/20-sample.toml"))
	n.Chroot("systemctl", "enable", "systemd-sysext.service", "kubelet.service", "csi-sample-driver.service")
	n.Boot()
	n.Run("csi-registrar", "wait", "--timeout", "55s", driver)
	n.eventually(1, 0)
	writes := func() int { return strings.Count(n.Read("/opt/events"), `"event":"csinode"`) }
	before := writes()
	n.unnoticed(newer, func() {
		n.Run("sh", "-ec", "cd /var/lib/extensions; mv csi-registrar /opt/older; mv /opt/newer csi-registrar; systemd-sysext refresh --always-refresh=yes")
	})
	if now := writes(); before == 0 || now != before {
		t.Errorf("%d writes of the CSINode, then %d", before, now)
	}
	t.Logf("the extension was updated from 0.1.98 to %s: %d writes of the CSINode before, %d afterwards", newer, before, writes())
}

// TestSignedSysext checks that a signed image is accepted, and refused with any of some changes. In
// a container the kernel's device mapper is not available, so the test verifies with userspace
// tools.
func TestSignedSysext(t *testing.T) {
	t.Parallel()
	squashfsTools(t)
	dir := t.TempDir()
	bin := tools(t, []string{dir, built.Root(t)}, "systemd-repart", "veritysetup", "openssl", "sfdisk")
	run := func(script string) (string, error) {
		cmd := exec.Command("sh", "-euc", script)
		cmd.Dir = built.Root(t)
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "d="+dir, "TMPDIR="+dir)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run(`for name in ours other; do
			openssl req -batch -new -x509 -newkey rsa:2048 -nodes -keyout "$d/$name.key" -out "$d/$name.crt" -days 2 -subj /CN=test
		done
		for n in 1 2; do DIST=$d/$n SYSEXT_KEY=$d/ours.key SYSEXT_CERT=$d/ours.crt scripts/sysext; done
		cmp "$d"/1/*.raw "$d"/2/*.raw; mv "$d"/1/*.raw "$d/image"; scripts/verify-sysext "$d/image" "$d/ours.crt"`)
	if err != nil || !strings.Contains(out, "intact: ") {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, c := range map[string]change{
		"another certificate":    {`scripts/verify-sysext "$d/image" "$d/other.crt"`, "is not signed by"},
		"the file system":        {`cp "$d/image" "$d/x"; printf x | dd of="$d/x" bs=1 seek=4000000 conv=notrunc status=none; scripts/verify-sysext "$d/x" "$d/ours.crt"`, "not those that were signed"},
		"the hash":               {`sed 's/"rootHash":"./"rootHash":"x/' "$d/image" >"$d/x"; scripts/verify-sysext "$d/x" "$d/ours.crt"`, "is not signed by"},
		"the signature":          {`sed 's/"signature":"MIIE/"signature":"MIID/' "$d/image" >"$d/x"; scripts/verify-sysext "$d/x" "$d/ours.crt"`, "is not signed by"},
		"an image without a key": {`DIST=$d/plain scripts/sysext; scripts/verify-sysext "$d"/plain/*.raw "$d/ours.crt"`, "it is not signed"},
	} {
		if out, err := run(c.script); err == nil || !strings.Contains(out, c.says) {
			t.Errorf("%s: %v, want %q in\n%s", name, err, c.says, out)
		}
	}
}

// tools makes a directory of programs that run Debian 13's programs of the same names, which see
// dirs but no other files of this machine.
func tools(t *testing.T, dirs []string, names ...string) (bin string) {
	t.Helper()
	m := nspawn.New(t, "trixie-tools") // stays off
	bin = t.TempDir()
	for _, name := range names {
		script := `#!/bin/sh
PATH=/usr/sbin:/usr/bin # the machine's tools, and not this script again
exec unshare --mount sh -euc 'for dir in /proc /dev /sys ` + strings.Join(dirs, " ") + `; do
	mkdir -p "$0$dir"
	mount --rbind "$dir" "$0$dir"
done
cat /etc/resolv.conf >"$0/etc/resolv.conf"
exec chroot "$0" ` + name + ` "$@"' ` + m.Disk + ` "$@"
`
		if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return bin
}

// squashfsTools makes mksquashfs and unsquashfs available.
func squashfsTools(t *testing.T) {
	t.Helper()
	if out, err := exec.Command(filepath.Join(built.Root(t), "scripts", "need"), "unsquashfs:squashfs-tools").CombinedOutput(); err != nil {
		nspawn.Need(t, "cannot install squashfs-tools: "+string(out))
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
