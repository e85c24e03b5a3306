package agent

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// The document counts and shows times by the wall clock of now, also those from before it was set.
func TestStatusWhenTheWallClockIsSet(t *testing.T) {
	for name, ahead := range map[string]time.Duration{"an hour back": time.Hour, "a year forward": -365 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			ago := func(d time.Duration) time.Time { return fake.WithWallClock(now.Add(-d), ahead) }
			a := New(slog.New(slog.DiscardHandler), &node{}, "test")
			a.running["a"] = &running{status: status.Driver{
				Name: "a", State: string(status.Registered), Driver: status.Ready, Registration: status.Registered,
				Since: ago(time.Hour), RegisteredAt: ago(time.Hour), LastGetInfoAt: ago(20 * time.Second),
				Restarts: []time.Time{ago(11 * time.Minute), ago(9 * time.Minute), ago(time.Minute)},
			}}
			a.Kubelet(status.Kubelet{PID: 812, ConfirmedAt: ago(time.Hour), EndedAt: ago(40 * time.Second)})
			s := a.Status()
			d, _ := s.Driver("a")
			if d.DriverRestarts != 2 || !strings.Contains(d.Reason, "ended 40s ago; one has asked since") {
				t.Errorf("%d restarts within %s, reason %q", d.DriverRestarts, status.RestartWindow, d.Reason)
			}
			for what, c := range map[string]struct {
				at  time.Time
				age time.Duration
			}{
				"since": {d.Since, time.Hour}, "registered": {d.RegisteredAt, time.Hour}, "asked": {d.LastGetInfoAt, 20 * time.Second},
				"confirmed": {s.Kubelet.ConfirmedAt, time.Hour}, "ended": {s.Kubelet.EndedAt, 40 * time.Second},
			} {
				if got := now.Round(0).Sub(c.at); (got - c.age).Abs() > time.Second {
					t.Errorf("%s %s ago, want %s", what, got, c.age)
				}
			}
		})
	}
}
