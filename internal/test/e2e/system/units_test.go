package system

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

func TestUnitsAreRight(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		m := nspawn.New(t, suite)
		install(t, m)
		units := []string{"csi-registrar-wait@some-driver.csi.service"}
		files, err := os.ReadDir(filepath.Join(built.Root(t), "systemd"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if name := f.Name(); strings.HasSuffix(name, ".service") || strings.HasSuffix(name, ".socket") {
				units = append(units, name)
			}
		}
		m.Boot()
		verify(t, m, units...)
		if out := m.Run("systemd-tmpfiles", "--create", "csi-registrar.conf"); out != "" {
			t.Errorf("systemd-tmpfiles says: %s", out)
		}
		const directories = "cd /var/lib/kubelet && stat -c %a . device-plugins plugins_registry pod-resources"
		if modes := m.Run("sh", "-c", directories); modes != strings.Repeat("750\n", 4) {
			t.Errorf("after the first boot the modes are %q", modes)
		}
		// The kubelet keeps the mode that it finds, and so does systemd-tmpfiles.
		for have, want := range map[string]string{"": "750\n", "mkdir -m 755 /var/lib/kubelet;": "755\n"} {
			got := m.Run("sh", "-c", "rm -rf /var/lib/kubelet;"+have+"systemd-tmpfiles --create csi-registrar.conf; stat -c %a /var/lib/kubelet")
			if got != want {
				t.Errorf("/var/lib/kubelet, %q before, has mode %s", have, got)
			}
		}
		for _, service := range []string{"csi-registrar-wait.service", "csi-registrar-wait@some-driver.csi.service", "csi-registrar-sweep.service"} {
			if got := m.Run("systemctl", "show", "--value", "--property=RestrictAddressFamilies", service); got != "AF_UNIX\n" {
				t.Errorf("%s is without its sandbox: RestrictAddressFamilies=%s", service, got)
			}
		}
		for service, most := range map[string]float64{unit: 0.7, "csi-registrar-wait.service": 4} {
			if exposure := exposure(t, m, service); suite == "trixie" && exposure > most {
				t.Errorf("exposure of %s is %.1f, at most %.1f is promised", service, exposure, most)
			}
		}
	})
}

func exposure(t *testing.T, m *nspawn.Machine, unit string) float64 {
	t.Helper()
	out := m.Run("systemd-analyze", "security", "--no-pager", unit)
	_, rest, _ := strings.Cut(out, "Overall exposure level for "+unit+": ")
	number, _, _ := strings.Cut(rest, " ")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	t.Logf("%s: exposure %.1f", unit, v)
	return v
}

// verify checks units with the systemd of the machine.
func verify(t *testing.T, m *nspawn.Machine, units ...string) {
	t.Helper()
	for line := range strings.Lines(m.Run(append([]string{"systemd-analyze", "verify", "--man=no"}, units...)...)) {
		if m.Suite != "bullseye" || !strings.Contains(line, "Unknown key name 'PrivateIPC' in section") {
			t.Errorf("systemd-analyze verify says: %s", line)
		}
	}
}

// TestStatelessMachine boots with a read-only /usr, with /etc and /var empty at each boot, and a
// distribution that enables nothing by default.
func TestStatelessMachine(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/usr/lib/systemd/system-preset/99-default-disable.preset", "disable *\n")
		for _, name := range append(n.drivers, "kubelet") {
			unit := "csi-sample@" + name + ".service"
			if name == "kubelet" {
				unit = "kubelet.service"
			} else {
				n.Write("/usr/lib/csi-registrar/conf.d/20-"+name+".toml", driverConfig(name))
			}
			wants := filepath.Join(n.Disk, "/usr/lib/systemd/system/multi-user.target.wants")
			if err := os.MkdirAll(wants, 0o755); err != nil {
				t.Fatal(err)
			}
			target := strings.Replace(unit, "@"+name, "@", 1)
			if err := os.Symlink("../"+target, filepath.Join(wants, unit)); err != nil {
				t.Fatal(err)
			}
		}
		n.Args = append(n.Args, "--volatile=yes")
		n.Boot()
		if out, err := n.Try("sh", "-c", "! touch /usr/x && ! test -e /etc/csi-registrar"); err != nil {
			t.Fatalf("not the machine that is meant: %v\n%s", err, out)
		}
		n.registered(0)
		before, mark := n.inodes(), n.mark()
		n.replaced("systemctl", "restart", unit)
		n.waited()
		n.quiet(mark)
		if after := n.inodes(); fmt.Sprint(after) != fmt.Sprint(before) {
			t.Errorf("inodes %v, were %v", after, before)
		}
	})
}

// TestRootDirIsMissing starts the daemon before the first start of the kubelet, and after the
// kubelet's directory was removed. Its sandbox does not have the directory then; the next one does.
func TestRootDirIsMissing(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Boot()
		n.registered(0)
		n.Run("systemctl", "stop", "kubelet.service", unit, socket) // the end of the socket sweeps
		n.Run("rm", "-r", "/var/lib/kubelet", "/run/csi-registrar")
		mark := n.mark()
		n.Run("systemctl", "start", unit, "kubelet.service")
		n.registered(mark)
	})
}

// TestRootDirIsRecreated removes and recreates the kubelet's directory while the daemon runs, as
// when a node is reset and joins again. The sandbox cannot follow, so the daemon must be replaced.
func TestRootDirIsRecreated(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		n.Run("systemctl", "stop", "kubelet.service")
		mark := n.mark()
		// The daemon restores its socket meanwhile.
		n.Run("sh", "-c", "until rm -r /var/lib/kubelet; do :; done; mkdir /var/lib/kubelet")
		n.Run("systemctl", "start", "kubelet.service")
		n.registered(mark)
	})
}

// TestWaitUnits checks that other units can be ordered after a registration.
func TestWaitUnits(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		n.Run("systemctl", "start", "csi-registrar-wait.service", "csi-registrar-wait@one.sample.csi.service")
		const late = "late-comer.sample.csi" // the dash does not need escaping
		n.Run("systemctl", "start", "--no-block", "csi-registrar-wait@"+late)
		n.awaitState("csi-registrar-wait@"+late, "activating")
		n.Write("/etc/csi-registrar/conf.d/30-late.toml", driverConfig(late))
		n.Run("systemctl", "start", "csi-sample@"+late)
		n.awaitState("csi-registrar-wait@"+late, "active")
		n.Run("csi-registrar", "status", late)
	})
}

// TestJournal checks that each transition has one entry, with fields, and that the catalog explains
// each.
func TestJournal(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		for _, fields := range [][]string{
			{"CSI_DRIVER=one.sample.csi", "CSI_STATE=registered", "SYSLOG_IDENTIFIER=csi-registrar", "PRIORITY=6"},
			{"CSI_DRIVER=two.sample.csi", "CSI_STATE=published"},
		} {
			out := n.Journal(append([]string{"--output=json", "_SYSTEMD_UNIT=" + unit}, fields...)...)
			if strings.Count(out, "\n") != 1 || !strings.Contains(out, `"MESSAGE_ID"`) {
				t.Errorf("%q: want one entry with MESSAGE_ID, got %s", fields, out)
			}
		}
		n.Run("journalctl", "--update-catalog")
		out := n.Journal("-x", "_SYSTEMD_UNIT="+unit, "CSI_STATE=registered")
		if !strings.Contains(out, "Subject: ") || !strings.Contains(out, "one.sample.csi") {
			t.Errorf("the catalogue does not explain it:\n%s", out)
		}
	})
}
