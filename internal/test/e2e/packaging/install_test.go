package packaging

import (
	"slices"
	"strings"
	"testing"
)

var suites = []string{"bullseye", "bookworm", "trixie"}

// mountVolume makes the files and mounts of a published volume of the driver.
func (n *node) mountVolume() {
	const volume = "/var/lib/kubelet/pods/6f6c/volumes/kubernetes.io~csi/pv-1"
	n.Run("mkdir", "-p", volume+"/mount")
	n.Write(volume+"/vol_data.json", `{"attachmentID":"x","driverName":"`+driver+`","volumeLifecycleMode":"Persistent"}`)
	n.Run("mount", "-t", "tmpfs", "tmpfs", volume+"/mount")
}

// umountVolume unmounts the volume and removes its files, as the kubelet does.
func (n *node) umountVolume() {
	n.Run("umount", "/var/lib/kubelet/pods/6f6c/volumes/kubernetes.io~csi/pv-1/mount")
	n.Run("rm", "-r", "/var/lib/kubelet/pods/6f6c")
}

func warned(out string) bool {
	return strings.Contains(out, "a volume of "+driver+" is mounted") && strings.Contains(out, "cannot unmount")
}

const edited = "# mine\n[log]\nlevel = \"debug\"\n"

// TestDeb installs, upgrades, downgrades and removes the two packages on a node.
func TestDeb(t *testing.T) {
	t.Parallel()
	for _, suite := range suites {
		t.Run(suite, func(t *testing.T) {
			n := newNode(t, suite)
			n.Boot()
			n.kubelet()
			install := func(name, version string) string {
				// The versions ship different configurations: the administrator's is kept, without
				// a question.
				return n.Run("dpkg", "--force-confold", "-i", n.file("deb", name, version))
			}

			// The driver's package first.
			install("csi-sample-driver", older)
			install("csi-registrar", older)
			n.eventually(1, 0)
			n.Write("/etc/csi-registrar/config.toml", edited)
			n.Run("csi-registrar", "config", "check")

			n.unnoticed(newer, func() { install("csi-registrar", newer) })
			n.unnoticed(older, func() { install("csi-registrar", older) }) // a downgrade
			install("csi-sample-driver", newer)                            // restarts the driver
			n.Run("csi-registrar", "wait", "--timeout", "55s", driver)
			if n.Read("/etc/csi-registrar/config.toml") != edited {
				t.Error("the modified configuration was not kept")
			}

			n.mountVolume()
			if out := n.Run("dpkg", "-r", "csi-registrar"); !warned(out) {
				t.Errorf("removal with a mounted volume does not warn:\n%s", out)
			}
			n.umountVolume()
			n.eventually(1, 1)
			install("csi-registrar", newer)
			n.eventually(2, 1)
			if n.Read("/etc/csi-registrar/config.toml") != edited {
				t.Error("the modified configuration was not kept over remove and install")
			}
			if out := n.Run("systemctl", "is-enabled", "csi-registrar.service"); !strings.HasPrefix(out, "enabled") {
				t.Errorf("the service is %s", out)
			}

			// The driver's package is removed, and installed after the daemon's.
			n.Run("dpkg", "-r", "csi-sample-driver")
			n.eventually(2, 2)
			install("csi-sample-driver", older)
			n.eventually(3, 2)

			// If the administrator has stopped the daemon, an upgrade does not start it, even if it
			// is enabled.
			n.Run("systemctl", "stop", "csi-registrar.service")
			n.eventually(3, 3)
			install("csi-registrar", newer)
			postinst := func(args ...string) {
				n.Run(append([]string{"env", "DPKG_MAINTSCRIPT_PACKAGE=csi-registrar", "/var/lib/dpkg/info/csi-registrar.postinst"}, args...)...)
			}
			postinst("abort-upgrade", older) // dpkg could not unpack a package
			if out, _ := n.Try("systemctl", "is-active", "csi-registrar.service"); strings.HasPrefix(out, "active") {
				t.Error("an upgrade started what the admin had stopped")
			}
			// The first installation starts it, even if the machine was reset before dpkg
			// configured the package, so that /run is empty.
			postinst("configure", "")
			n.eventually(4, 3)

			n.Write("/etc/csi-registrar/conf.d/60-mine.toml", "[log]\n")
			n.Run("dpkg", "-P", "csi-registrar", "csi-sample-driver")
			n.eventually(4, 4)
			left := slices.DeleteFunc(n.ours(), func(path string) bool { return strings.HasPrefix(path, "/var/cache/") })
			if len(left) > 0 {
				t.Errorf("purge left %q", left)
			}
		})
	}
}

// TestRPM does the same with rpm, where units are only enabled by a preset.
func TestRPM(t *testing.T) {
	t.Parallel()
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) {
			n := newNode(t, suite)
			n.Write("/etc/systemd/system-preset/99-default-disable.preset", "disable *\n")
			// A distribution's preset for a driver that it ships.
			n.Write("/etc/systemd/system-preset/50-drivers.preset", "enable csi-sample-driver.service\n")
			n.Boot()
			n.kubelet()
			rpm := func(how, name, version string) string {
				return n.Run("rpm", how, "--nodeps", n.file("rpm", name, version))
			}
			rpm("-i", "csi-sample-driver", older)
			rpm("-i", "csi-registrar", older)
			n.eventually(1, 0)
			n.Write("/etc/csi-registrar/config.toml", edited)
			n.unnoticed(newer, func() { rpm("-U", "csi-registrar", newer) })
			n.unnoticed(older, func() {
				n.Run("rpm", "-U", "--oldpackage", "--nodeps", n.file("rpm", "csi-registrar", older))
			})
			// The scriptlets of an older version do not know files of a newer one.
			n.unnoticed(newer, func() { rpm("-U", "csi-registrar", newer) })
			if n.Read("/etc/csi-registrar/config.toml") != edited {
				t.Error("the modified configuration was not kept")
			}
			n.mountVolume()
			if out := n.Run("rpm", "-e", "--nodeps", "csi-registrar"); !warned(out) {
				t.Errorf("removal with a mounted volume does not warn:\n%s", out)
			}
			n.umountVolume()
			n.eventually(1, 1)
			if out, err := n.Try("sh", "-c", "ls -d /run/csi-registrar* && find /run/csi-registrar*"); err == nil {
				t.Errorf("removal left %s", out)
			}
			rpm("-i", "csi-registrar", newer)
			n.eventually(2, 1)
			n.Run("rpm", "-e", "--nodeps", "csi-sample-driver")
			n.eventually(2, 2)
			rpm("-i", "csi-sample-driver", newer)
			n.eventually(3, 2)
			if out := n.Run("rpm", "-V", "--nodeps", "csi-registrar", "csi-sample-driver"); strings.TrimSpace(out) != "" {
				t.Errorf("rpm -V says %s", out)
			}
			n.Run("rpm", "-e", "--nodeps", "csi-registrar", "csi-sample-driver") // the newer one
			n.eventually(3, 3)
			if out, err := n.Try("sh", "-c", "ls -d /run/csi-registrar* && find /run/csi-registrar*"); err == nil {
				t.Errorf("removal left %s", out)
			}
		})
	}
}

// TestPreset checks that units that a preset of the administrator or the image disables are not
// started.
func TestPreset(t *testing.T) {
	t.Parallel()
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) {
			n := newNode(t, suite)
			n.Write("/etc/systemd/system-preset/10-image.preset", "disable csi-registrar.service\n")
			n.Boot()
			n.Run("dpkg", "-i", n.file("deb", "csi-registrar", newer))
			for _, ask := range []string{"is-enabled", "is-active"} {
				if out, err := n.Try("systemctl", ask, "csi-registrar.service"); err == nil {
					t.Errorf("%s: %s", ask, out)
				}
			}
		})
	}
}

// TestOffline installs into the root directory of an image that does not run, with nothing mounted
// in it, and boots the image.
func TestOffline(t *testing.T) {
	t.Parallel()
	install := map[string][]string{
		"deb": {"dpkg", "-i"},
		"rpm": {"rpm", "-i", "--nodeps"},
	}
	for _, suite := range suites {
		for format, command := range install {
			if format == "rpm" && suite != "trixie" {
				continue
			}
			t.Run(suite+"/"+format, func(t *testing.T) {
				n := newNode(t, suite)
				if format == "rpm" {
					n.Write("/etc/systemd/system-preset/99-default-disable.preset", "disable *\n")
					n.Write("/etc/systemd/system-preset/50-drivers.preset", "enable csi-sample-driver.service\n")
				}
				n.Chroot(append(command, n.file(format, "csi-registrar", newer), n.file(format, "csi-sample-driver", newer))...)
				n.Boot()
				n.kubelet()
				n.eventually(1, 0)
				n.Run("systemctl", "is-active", "csi-registrar.service", "csi-registrar.socket")
			})
		}
	}
}
