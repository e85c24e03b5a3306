package cli

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/test/hostile"
)

const hour, day = time.Hour, 24 * time.Hour

// node returns a status with a driver in each state.
func node() status.Document {
	refused := because(driverIn("refused.csi.example", "refused", 12*time.Second), `the kubelet refused: driver name "refused.csi.example" is already registered`)
	refused.KubeletError = "already registered"
	published := driverIn("published.csi.example", "published", 3*time.Second)
	published.LastGetInfoAt = noon.Add(-2 * time.Second)
	published.Reason = "the kubelet has asked, and has not confirmed yet: it now asks the driver itself"
	kept := driverIn("nfs.csi.k8s.io", "registered", 75*day+3*hour)
	kept.DriverSince, kept.DriverRestarts = noon.Add(-12*time.Minute), 2
	kept.Driver, kept.Reason = status.Absent, "the driver is not ready, its registration is kept: connection refused"
	s := newFake(
		because(driverIn("absent.csi.example", "absent", 90*time.Second), "no such file"),
		because(driverIn("conflict.csi.example", "conflict", 2*hour+5*time.Minute), "another registrar (pid 4711, node-driver-reg) listens on /var/lib/kubelet/plugins_registry/conflict.csi.example-reg.sock; stop it, or disable the driver here"),
		driverIn("ebs.csi.aws.com", "registered", 3*day+4*hour),
		because(driverIn("mismatch.csi.example", "mismatch", 400*time.Millisecond), "it says that its name is other.csi.example"),
		kept,
		driverIn("off.csi.example", status.Disabled, 0),
		published,
		driverIn("ready.csi.example", "ready", -time.Second), // a clock that was set back
		refused,
		because(driverIn("starting.csi.example", "starting", 20*time.Second), "Probe: not ready"),
	).Status()
	return s
}

// degradedNode returns a status with everything that degrades a working daemon or registration.
func degradedNode() status.Document {
	notKept := driverIn("a.csi.example", "registered", hour)
	notKept.NotKept = "the descriptor store is full"
	damped := driverIn("b.csi.example", "registered", hour)
	damped.DampedUntil = noon.Add(3 * time.Minute)
	stuck := because(driverIn("c.csi.example", "absent", hour), "the file system of /mnt/nfs/csi.sock does not answer")
	stuck.NotKept = "a reason that is less important"
	s := newFake(notKept, damped, stuck).Status()
	s.Polling = "cannot start inotify: too many open files"
	s.Withdrawals = []status.Withdrawal{{Driver: "d.csi.example", RegistrationSocket: "/old/plugins_registry/d.csi.example-reg.sock", Since: noon.Add(-time.Minute), Error: "read-only file system"}}
	s.Stuck = []status.StuckCall{{Path: "/mnt/\x1b[2Jfuse", Since: noon.Add(-2 * hour)}, {Path: "/mnt/nfs/csi.sock", Since: noon.Add(-3 * time.Minute)}}
	return s
}

func TestStatusTable(t *testing.T) {
	withErrors := node()
	withErrors.Drivers = withErrors.Drivers[:1]
	withErrors.ConfigError = "/etc/csi-registrar/conf.d/60-nfs.toml:3: driver.\"nfs.csi.k8s.io\".timeout: \"5\" has no unit (such as 5s)\n" +
		"/etc/csi-registrar/conf.d/70-smb.toml:1: the file cannot be read: expected a table header, found something that is rather long"
	long := node()
	long.Drivers = []status.Driver{
		driverIn(strings.Repeat("long.", 10)+"csi.example.or", "registered", 3*day+4*hour),
		because(driverIn("short.example", "absent", 5*time.Minute), strings.Repeat("why ", 300)),
	}
	hostile := node()
	hostile.Drivers = []status.Driver{
		because(driverIn("a\x1b[2Jb\u202e\n", "absent", hour), "gone\x1b]0;owned\x07\r\n\u202e\u200b\xff"+strings.Repeat("A", 1<<20)),
	}
	hostile.ConfigError = "file\x1b[2J:1: \u202ebad"
	plain80 := page{columns: 80}
	for name, c := range map[string]struct {
		s status.Document
		p page
	}{
		"all":      {node(), plain80},
		"narrow":   {node(), page{columns: 60}},
		"colour":   {node(), page{columns: 80, colour: true}},
		"errors":   {withErrors, plain80},
		"degraded": {degradedNode(), plain80},
		"long":     {long, plain80},
		"hostile":  {hostile, plain80},
	} {
		got := statusTable(c.s, c.p, noon)
		golden(t, "status/"+name+".txt", got)
		harmless(t, name, got, c.p.colour)
		for line := range strings.Lines(got) { // a long name makes all rows long
			row := !strings.HasPrefix(line, " ") && strings.Contains(line, "  ")
			if n := visibleLength(line); name != "long" && !(row && name == "narrow") && n > c.p.columns && strings.Contains(strings.TrimSpace(line), " ") {
				t.Errorf("%s: %d columns: %s", name, n, line)
			}
		}
	}
}

// harmless checks that a text has no control sequences for a terminal, except for colours.
func harmless(t *testing.T, name, text string, colour bool) {
	t.Helper()
	if colour {
		for _, code := range []string{red, green, yellow, bold, dim, "0"} {
			text = strings.ReplaceAll(text, "\x1b["+code+"m", "")
		}
	}
	if r, found := hostile.Control(text); found {
		t.Errorf("%s has %U", name, r)
	}
}

func TestDriverText(t *testing.T) {
	d := driverIn("nfs.csi.k8s.io", "registered", 3*day+4*hour)
	told := int64(24)
	d.Driver, d.DriverSince, d.DriverRestarts, d.KubeletMaxVolumes = status.Absent, noon.Add(-time.Minute), 4, &told
	d.NodeID, d.DriverVersion, d.MaxVolumes, d.Republications = "node-1\x1b[2J", "4.1.0", 25, 2
	d.Topology = map[string]string{"topology.kubernetes.io/zone": "b", "topology.kubernetes.io/region": "a\u202e"}
	d.Reason = strings.Repeat("a reason that goes on ", 30)
	d.NotKept, d.DampedUntil = "the descriptor store is full", noon.Add(3*time.Minute)
	golden(t, "status/driver.txt", driverText(d, "", page{columns: 80}, noon))
	harmless(t, "driver", driverText(d, "", page{columns: 80}, noon), false)

	// The reason is complete here, unlike in the table.
	d.Reason = strings.Repeat("x", 5000) + " end"
	if !strings.Contains(driverText(d, "", page{columns: 80}, noon), " end") {
		t.Error("the reason is cut off")
	}
}

// visibleLength counts the characters of a line without the colours.
func visibleLength(line string) int {
	return utf8.RuneCountInString(colours.ReplaceAllString(strings.TrimSuffix(line, "\n"), ""))
}

var colours = regexp.MustCompile("\x1b\\[[0-9]*m")

func TestColour(t *testing.T) {
	tty := func(io.Writer) (int, bool) { return 100, true }
	for _, c := range []struct {
		vars string
		tty  bool
		want bool
	}{{"", true, true}, {"", false, false}, {"NO_COLOR=1", true, false}, {"TERM=dumb", true, false}} {
		s := newSession(c.vars)
		if c.tty {
			s.env.terminal = tty
		}
		if got := s.env.page().colour; got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	if p := newSession("COLUMNS=132").env.page(); p.columns != 132 {
		t.Errorf("COLUMNS is not heeded: %+v", p)
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 0: "0s", 59 * time.Second: "59s", time.Minute: "1m", 61 * time.Second: "1m1s",
		59*time.Minute + 59*time.Second: "59m59s", time.Hour: "1h", 23*time.Hour + 59*time.Minute: "23h59m",
		24 * time.Hour: "1d", 500*24*time.Hour + 3*time.Hour: "500d3h",
	} {
		if got := age(d); got != want {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
}

// A drop-in that was copied a moment ago is there, although the daemon has not read it yet.
func TestStatusBeforeTheFilesAreRead(t *testing.T) {
	root := fake.ShortDir(t)
	newFake().serve(t, root)
	dir := filepath.Join(root, "etc/csi-registrar/conf.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if s := newSession(); s.run(t.Context(), "status", "--config-root", root) != 0 || !strings.Contains(s.stdout.String(), "No drivers are configured") {
		t.Errorf("without a file: %s", s.stdout)
	}
	if err := os.WriteFile(filepath.Join(dir, "60-a.toml"), []byte("[driver.\"a.csi.example\"]\nsocket = \"/run/a/csi.sock\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s := newSession(); s.run(t.Context(), "status", "--config-root", root) != 1 || !strings.Contains(s.stdout.String(), "has not yet read the files, which configure 1 driver") {
		t.Errorf("with one: %s", s.stdout)
	}
	if s := newSession(); s.run(t.Context(), "status", "--json", "--config-root", root) != 1 {
		t.Errorf("with one, as JSON: %s", s.stdout)
	}
}

// TestAnEndedKubeletIsToldOnce checks that the end of the kubelet is reported once, in the reason
// of the registrations that it had confirmed or below the table, and that the last line does not
// hide it. It is a failure once a restart would have finished.
func TestAnEndedKubeletIsToldOnce(t *testing.T) {
	s := status.Document{Kubelet: status.Kubelet{PID: 812, EndedAt: noon.Add(-40 * time.Second)}}
	p := page{columns: 200}
	d := driverIn("a.example", "published", time.Hour)
	s.Drivers = []status.Driver{d}
	if text := statusTable(s, p, noon); strings.Count(text, "ended 40s ago") != 1 {
		t.Errorf("%s", text)
	}
	d = driverIn("a.example", "registered", time.Hour)
	s.Drivers = []status.Driver{because(d, s.KubeletEnded(d, noon))}
	if text := statusTable(s, p, noon); strings.Count(text, "ended 40s ago") != 2 || !strings.HasSuffix(text, "\n1 of 1 drivers registered, with a kubelet that has ended 40s ago\n") {
		t.Errorf("%s", text)
	}
	for ended, fails := range map[time.Duration]bool{149 * time.Second: false, 150 * time.Second: true} {
		s.Kubelet.EndedAt = noon.Add(-ended)
		for _, o := range []statusOptions{{}, {driver: "a.example"}} {
			if err := o.exitError(s, "", noon); (err != nil) != fails {
				t.Errorf("%v, %q: %v", ended, o.driver, err)
			}
		}
	}
}
