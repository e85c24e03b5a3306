package control

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/status"
)

// sample returns a status with values for all metrics, and with drivers without a valid name.
func sample() status.Document {
	refused := status.Driver{
		Name: "b.csi.example", State: "refused", Driver: status.Ready, Registration: status.Refused, Since: at(20),
		KubeletError: "no", LastGetInfoAt: at(19.125), Accepted: 2, Refusals: 3,
		Republications: 3, RepublicationsBy: map[string]uint64{"removed": 1, "changed": 2},
		NotKept: "the descriptor store is full", DampedUntil: at(300), Traced: true,
	}
	s := newDaemon(
		registeredDriver("a.csi.example"), refused,
		status.Driver{Name: "off.csi.example", State: status.Disabled, Driver: status.Absent},
		status.Driver{Name: "", State: "absent", Driver: status.Absent},
		status.Driver{Name: "../../x\"\n", State: "absent", Driver: status.Absent, Accepted: 9},
	).Status()
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
	if got := string(exposition(sample(), 0)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestExpositionOfNothing(t *testing.T) {
	got := string(exposition(newDaemon().Status(), 0))
	if strings.Contains(got, "driver") {
		t.Errorf("series of drivers without a driver:\n%s", got)
	}
}

func TestRepublicationReasons(t *testing.T) {
	for _, cause := range []registrar.Cause{
		registrar.CauseRemoved, registrar.CauseReplaced, registrar.CauseChanged, registrar.CauseAsked, registrar.CauseReturned, registrar.CauseSilent,
	} {
		if !slices.Contains(republicationReasons, string(cause)) {
			t.Errorf("%s is not in the list", cause)
		}
	}
}

func TestPromtool(t *testing.T) {
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is missing (Debian: prometheus)")
	}
	for name, s := range map[string]status.Document{"sample": sample(), "nothing": newDaemon().Status()} {
		cmd := exec.CommandContext(t.Context(), tool, "check", "metrics")
		cmd.Stdin = strings.NewReader(string(exposition(s, 0)))
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
