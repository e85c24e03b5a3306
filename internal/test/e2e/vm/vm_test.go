package vm_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/e2e/system/nspawn"
	"csi-registrar/internal/test/e2e/vm"
)

func TestMain(m *testing.M) { built.Main(m) }

const (
	drivers  = 5
	cuts     = 5
	registry = "/var/lib/kubelet/plugins_registry"
	limit    = 10 * time.Minute

	// Two versions, to go from one to the other.
	older, newer = "0.1.98", "0.1.99"
)

func driver(i int) string { return fmt.Sprintf("d%d.example", i) }

// machine is a machine with our package, drivers, and the registration part of the kubelet, which
// records what it sees.
type machine struct {
	*vm.Machine
	t *testing.T
}

const driverUnit = `[Unit]
Before=kubelet.service
[Service]
ExecStart=/usr/bin/csi-sample-driver --socket /run/csi-%i/csi.sock --name %i --data /run/csi-%i/volumes
RuntimeDirectory=csi-%i
[Install]
WantedBy=multi-user.target
`

const kubeletUnit = `[Service]
ExecStart=/opt/kubelet --root /var/lib/kubelet --handler record
StandardOutput=truncate:/run/events
StandardError=null
[Install]
WantedBy=multi-user.target
`

func newMachine(t *testing.T, prepare ...func(disk *nspawn.Machine)) *machine {
	t.Helper()
	m := vm.New(t, func(disk *nspawn.Machine) {
		kubelet := filepath.Join(t.TempDir(), "kubelet")
		build := exec.Command("go", "build", "-ldflags=-s -w", "-o", kubelet, "./cmd/kubelet")
		build.Dir = filepath.Join(built.Root(t), "internal", "test", "e2e")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		put(t, disk, kubelet, "/opt/kubelet", 0o755)
		put(t, disk, built.SampleDriver(t), "/usr/bin/csi-sample-driver", 0o755)
		disk.Write("/usr/lib/systemd/system/kubelet.service", kubeletUnit)
		disk.Write("/usr/lib/systemd/system/csi-sample@.service", driverUnit)
		enable := []string{"systemctl", "enable", "kubelet.service"}
		for i := range drivers {
			disk.Write("/etc/csi-registrar/conf.d/20-"+driver(i)+".toml",
				fmt.Sprintf("[driver.%q]\nsocket = \"/run/csi-%s/csi.sock\"\n", driver(i), driver(i)))
			enable = append(enable, "csi-sample@"+driver(i)+".service")
		}
		for _, version := range []string{older, newer} {
			debs, err := filepath.Glob(filepath.Join(built.Packages(t, version), "csi-registrar_*.deb"))
			if err != nil || len(debs) != 1 {
				t.Fatal(debs, err)
			}
			put(t, disk, debs[0], "/opt/"+version+".deb", 0o644)
		}
		disk.Chroot("dpkg", "-i", "/opt/"+older+".deb")
		disk.Chroot(enable...)
		for _, more := range prepare {
			more(disk)
		}
	})
	m.Append = "systemd.mask=containerd.service"
	return &machine{m, t}
}

func put(t testing.TB, disk *nspawn.Machine, from, to string, mode os.FileMode) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	disk.WriteMode(to, string(b), mode)
}

// registered waits until the kubelet has registered each driver once, and fails if it saw more than
// that, or if other files of ours exist.
func (n *machine) registered() {
	n.t.Helper()
	n.registeredTimes(map[string]int{})
}

// registeredTimes is registered, for drivers that were registered so many times more.
func (n *machine) registeredTimes(more map[string]int) {
	n.t.Helper()
	n.Run("csi-registrar wait --timeout 280s")
	n.Eventually(limit, "the registrations of each driver", func() error {
		saw := map[string]int{}
		for line := range strings.Lines(n.Run("cat /run/events")) {
			var e harness.Event
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			saw[e.Event+" "+e.Driver]++
		}
		for i := range drivers {
			if got := saw["register "+driver(i)]; got != 1+more[driver(i)] {
				return fmt.Errorf("%s was registered %d times: %v", driver(i), got, saw)
			}
			// The kubelet deregisters a driver before each further registration.
			if saw["deregister "+driver(i)] != more[driver(i)] {
				return fmt.Errorf("deregistered: %v", saw)
			}
		}
		return nil
	})
	var want strings.Builder
	for i := range drivers {
		fmt.Fprintf(&want, "%s/%s-reg.sock\n", registry, driver(i))
	}
	n.Eventually(limit, "only the registration sockets", func() error {
		if got := n.Run("find /var/lib/kubelet -type s ! -path '*/pod-resources/*' | sort"); got != want.String() {
			return fmt.Errorf("sockets in the kubelet's directory:\n%swant:\n%s", got, want.String())
		}
		return nil
	})
	n.Run("csi-registrar config check")
	// Logged only, because some are caused by a slow machine.
	n.t.Logf("warnings of the daemon:\n%s", n.Run("journalctl --quiet --no-pager -b -p warning -u csi-registrar.service || true"))
}

// cut runs a script in a loop, cuts the power at a given time after its start, and boots.
func (n *machine) cut(script string, within time.Duration) {
	n.t.Helper()
	n.Run("rm -f /run/began; (while :; do touch /run/began; " + script + "; done) >/dev/null 2>&1 &")
	n.Eventually(limit, "the begin of it", func() error {
		_, err := n.Try("test -e /run/began")
		return err
	})
	after := rand.N(within)
	n.t.Logf("cut %s after the begin of: %s", after.Round(time.Millisecond), script)
	time.Sleep(after) // the moment of the power cut
	n.PowerCut()
	start := time.Now()
	n.Boot()
	n.t.Logf("booted after %s", time.Since(start).Round(time.Second))
}

// TestPowerCutWhilePublishing cuts the power while the daemon is stopped and started in a loop,
// with another configuration each time.
func TestPowerCutWhilePublishing(t *testing.T) {
	n := newMachine(t)
	n.Boot()
	n.registered()
	for range cuts {
		n.cut(`systemctl stop csi-registrar; level=$([ "$level" = info ] && echo debug || echo info);
			printf '[log]\nlevel = "%s"\n' "$level" >/etc/csi-registrar/conf.d/90-log.toml; systemctl start csi-registrar`, 10*time.Second)
		n.registered()
	}
}

// TestPowerCutWhileUpgrading cuts the power during an upgrade or a downgrade. After the boot one of
// the two versions runs, and dpkg can continue.
func TestPowerCutWhileUpgrading(t *testing.T) {
	n := newMachine(t)
	n.Boot()
	n.registered()
	for range cuts {
		n.cut("dpkg -i /opt/"+newer+".deb; dpkg -i /opt/"+older+".deb", 40*time.Second)
		n.registered()
		version := strings.TrimSpace(n.Run("csi-registrar --version"))
		if !strings.Contains(version, older) && !strings.Contains(version, newer) {
			t.Errorf("version %q", version)
		}
		t.Logf("after the boot: %s; dpkg: %s", version, n.Run("dpkg --audit; dpkg-query -W -f '${Version} ${Status}' csi-registrar"))
		// Unpacked packages are configured; one that was being unpacked has to be installed again,
		// as dpkg reports.
		n.Run("dpkg --configure -a || true; dpkg -i /opt/" + older + ".deb")
		n.registered()
	}
}

// TestClock sets the wall clock back and forth, by an hour and by a year, and then restarts the
// daemon, kills it, restarts a driver, and asks for a registration.
func TestClock(t *testing.T) {
	n := newMachine(t)
	n.Boot()
	n.registered()
	more := map[string]int{}
	for i, step := range []string{"1 hour", "-1 hour", "-1 hour", "1 year", "-1 year", "-1 year", "2 years"} {
		t.Logf("clock: %s", strings.TrimSpace(n.Run("date; date --set '"+step+"'")))
		n.registeredTimes(more)
		n.Run("systemctl restart csi-registrar.service")
		n.registeredTimes(more)
		n.Run("systemctl kill --signal=KILL csi-registrar.service")
		n.registeredTimes(more)
		d := driver(i % drivers)
		n.Run("systemctl restart csi-sample@" + d + ".service")
		n.registeredTimes(more)
		t.Log(n.Run("csi-registrar reregister " + d))
		more[d]++
		n.registeredTimes(more)
		out := n.Run("csi-registrar status") // ends with 0
		if regexp.MustCompile(`\s-\d`).MatchString(out) {
			t.Errorf("a negative age:\n%s", out)
		}
		t.Log(out)
	}
}

// TestSELinux runs the daemon and its drivers with Debian's policy in enforcing mode. It only logs
// the denials.
func TestSELinux(t *testing.T) {
	n := newMachine(t, func(disk *nspawn.Machine) {
		disk.Write("/etc/selinux/config", "SELINUX=enforcing\nSELINUXTYPE=default\n")
		disk.Chroot("setfiles", "-F", "/etc/selinux/default/contexts/files/file_contexts", "/")
	})
	n.Append += " security=selinux selinux=1 enforcing=1"
	n.Boot()
	if mode := strings.TrimSpace(n.Run("getenforce")); mode != "Enforcing" {
		t.Fatalf("SELinux is %s", mode)
	}
	n.registered()
	n.Run("systemctl restart csi-registrar.service")
	n.registered() // once each, because the restart was not noticed
	t.Log(n.Run("ps -eo label,args | grep -E 'csi-|kubelet' | grep -v grep; ls -Z " + registry + " /run/csi-registrar"))
	t.Log(n.Run("journalctl -b --no-pager --quiet _TRANSPORT=kernel + _TRANSPORT=audit | grep -i 'avc.*denied' | tail -40 || true"))
}
