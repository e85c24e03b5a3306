package driver

import (
	"testing"
	"time"

	"csi-registrar/internal/node/status"
)

// The pause doubles for as long as the driver is absent, and for as long as it answers after the
// first seconds, and begins again when one follows the other.
func TestBackoff(t *testing.T) {
	absent := status.Report{Driver: status.Absent}
	answers := status.Report{Driver: status.Starting, Connection: 1}
	cannotAsk := status.Report{Driver: status.Starting}
	var b backoff
	now := time.Now()
	e := askEagerly.Seconds()
	for i, step := range []struct {
		rep  status.Report
		want float64 // seconds
	}{
		{absent, 1}, {absent, 2}, {absent, 4}, {absent, 8}, {absent, 16}, {absent, 30}, {absent, 30},
		{cannotAsk, 1}, {absent, 1}, {absent, 2},
		{answers, e}, {answers, e}, {absent, 1}, {absent, 2},
		{answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e},
		{answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e},
		{answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e}, {answers, e},
		{answers, 1}, {answers, 2}, {cannotAsk, 1}, {answers, 4}, {answers, 8}, {answers, 16}, {answers, 30},
	} {
		want := time.Duration(step.want * float64(time.Second))
		if got := b.next(step.rep, now); got < want-want/20 || got > want+want/20 {
			t.Errorf("step %d: %s, want %s", i, got, want)
		}
		now = now.Add(want)
	}
}

// In an outage of an hour a driver is asked at most 150 times. Whenever it ends, the driver is
// asked again early enough for a registration within 33 s, of which the kubelet needs one.
func TestBackoffInAnOutage(t *testing.T) {
	for range 100 {
		var b backoff
		begin := time.Now()
		asked := 0
		for now := begin; now.Sub(begin) < time.Hour; asked++ {
			pause := b.next(status.Report{Driver: status.Starting, Connection: 1}, now)
			if pause > 32*time.Second {
				t.Fatalf("a pause of %s", pause)
			}
			now = now.Add(pause)
		}
		if asked > 150 {
			t.Fatalf("asked %d times", asked)
		}
	}
}
