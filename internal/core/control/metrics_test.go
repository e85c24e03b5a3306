package control

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"csi-registrar/internal/node/status"
)

// sample returns a status with values for all metrics, and with drivers without a valid name.
func sample() status.Document {
	refused := status.Driver{
		Name: "b.csi.example", State: "refused", Driver: status.Ready, Registration: status.Refused, Since: at(20),
		KubeletError: "no", LastGetInfoAt: at(19.125), Accepted: 2, Refusals: 3,
		Republications: 3,
		NotKept:        "the descriptor store is full", DampedUntil: at(300), ServedBy: status.ServedBy{PID: 7},
	}
	down := registeredDriver("c.csi.example")
	down.Driver, down.DriverRestarts, down.RestartsTotal = status.Absent, status.ManyRestarts, 7
	s := newDaemon(
		registeredDriver("a.csi.example"), refused, down,
		status.Driver{Name: "off.csi.example", State: status.Disabled, Driver: status.Absent},
		status.Driver{Name: "", State: "absent", Driver: status.Absent},
		status.Driver{Name: "../../x\"\n", State: "absent", Driver: status.Absent, Accepted: 9},
	).Status()
	s.NodeVolumes = &status.NodeVolumes{Volumes: status.Volumes{Published: 5, Waiting: 2, Late: 1}, Unregistered: 4}
	s.Version = "1.2.3\"\\\n\u202e"
	s.ConfigError, s.Polling = "one", "cannot start inotify: too many open files"
	s.Kubelet = status.Kubelet{PID: 812, ConfirmedAt: at(1), EndedAt: at(30)}
	s.Stuck = []status.StuckCall{{Path: "/mnt/nfs/csi.sock", Since: at(5)}, {Path: "/mnt/fuse/csi.sock", Since: at(6)}}
	return s
}

func TestExposition(t *testing.T) {
	golden, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.ReplaceAll(string(golden), "GOVERSION", runtime.Version())
	if got := string(exposition(sample())); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestExpositionOfNothing(t *testing.T) {
	got := string(exposition(newDaemon().Status()))
	if strings.Contains(got, "driver") {
		t.Errorf("series of drivers without a driver:\n%s", got)
	}
}

// The budget of series. Prometheus pays for each one on each node, so a new metric of a driver
// replaces one.
func TestSeriesBudget(t *testing.T) {
	const forNode, forDriver = 40, 12
	node, drivers := 0, map[string]int{}
	for line := range strings.Lines(string(exposition(sample()))) {
		_, driver, found := strings.Cut(line, `{driver="`)
		if name, _, _ := strings.Cut(driver, `"`); found {
			drivers[name]++
		} else if !strings.HasPrefix(line, "#") {
			node++
		}
	}
	if node == 0 || node > forNode {
		t.Errorf("%d series for a node, at most %d are good", node, forNode)
	}
	if len(drivers) != 4 {
		t.Errorf("series of the drivers %v", drivers)
	}
	for name, n := range drivers {
		if n > forDriver {
			t.Errorf("%d series for %s, at most %d are good", n, name, forDriver)
		}
	}
}

func TestPromtool(t *testing.T) {
	tool := promtool(t)
	for name, s := range map[string]status.Document{"sample": sample(), "nothing": newDaemon().Status()} {
		cmd := exec.CommandContext(t.Context(), tool, "check", "metrics")
		cmd.Stdin = strings.NewReader(string(exposition(s)))
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

func TestMetricsContentType(t *testing.T) {
	_, _, header := do(Handler(newDaemon()), "GET", "/metrics")
	if got := header.Get("Content-Type"); got != "text/plain; version=0.0.4; charset=utf-8" {
		t.Error(got)
	}
}
