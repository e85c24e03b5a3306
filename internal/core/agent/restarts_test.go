package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
)

// Restarts of the last 10 minutes are counted when somebody looks: no event tells when one is over.
func TestRestartsOfTheLastTenMinutes(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, _ *node) {
		apply(t, a, conf("/k", drv("a"), drv("b")))
		begin := time.Now()
		a.change(func() {
			for name, r := range a.running {
				if name == "a" {
					r.status.Restarts = []time.Time{begin.Add(-status.RestartWindow), begin, begin.Add(time.Minute), begin.Add(2 * time.Minute)}
				}
			}
		})
		var got []int
		for _, pause := range []time.Duration{3 * time.Minute, 7*time.Minute - 1, 1, 2 * time.Minute} {
			time.Sleep(pause)
			d, _ := a.Status().Driver("a")
			got = append(got, d.DriverRestarts)
			if many := d.DriverRestarts >= status.ManyRestarts; many != strings.Contains(d.Reason, "the driver restarted 3 times within 10m0s") {
				t.Errorf("%d restarts, reason %q", d.DriverRestarts, d.Reason)
			}
		}
		if !slices.Equal(got, []int{3, 3, 2, 0}) {
			t.Errorf("counted %v", got)
		}
		if d, _ := a.Status().Driver("b"); d.DriverRestarts != 0 || d.Reason != "" {
			t.Errorf("%+v", d)
		}
	})
}

// The answer of another registrar counts for 15 seconds, when somebody looks: it may not have been
// asked again.
func TestAnswerOfAnotherRegistrarLasts15Seconds(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, _ *node) {
		apply(t, a, conf("/k", drv("a")))
		begin := time.Now()
		a.change(func() {
			for _, r := range a.running {
				r.status.ServedBy = status.ServedBy{PID: 7, Since: begin.Add(-time.Minute), AskedAt: begin}
			}
		})
		for _, c := range []struct {
			pause  time.Duration
			served bool
		}{{0, true}, {15 * time.Second, true}, {1, false}} {
			time.Sleep(c.pause)
			d, _ := a.Status().Driver("a")
			if (d.ServedBy.PID == 7) != c.served || (d.ServedBy == status.ServedBy{}) == c.served {
				t.Errorf("after %s: %+v", time.Since(begin), d.ServedBy)
			}
			if c.served && d.ServedBy.AskedAt.Location() != time.UTC {
				t.Errorf("%s", d.ServedBy.AskedAt)
			}
		}
	})
}
