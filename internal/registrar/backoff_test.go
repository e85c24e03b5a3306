package registrar

import (
	"testing"
	"time"

	"csi-registrar/internal/status"
)

// The pause doubles for as long as the driver is absent, and for as long as it answers after the
// first seconds, and begins again when one follows the other.
func TestBackoff(t *testing.T) {
	absent := status.Report{Driver: status.Absent}
	answers := status.Report{Driver: status.Starting, Connection: 1}
	cannotAsk := status.Report{Driver: status.Starting}
	var b Backoff
	now := time.Now()
	for i, step := range []struct {
		rep  status.Report
		want time.Duration
	}{
		{absent, 1}, {absent, 2}, {absent, 4}, {absent, 8}, {absent, 16}, {absent, 30}, {absent, 30},
		{cannotAsk, 1}, {absent, 1}, {absent, 2},
		{answers, 1}, {answers, 1}, {absent, 1}, {absent, 2},
		{answers, 1}, {answers, 1}, {answers, 1}, {answers, 1}, {answers, 1}, {answers, 1}, {answers, 1}, {answers, 1},
		{answers, 1}, {answers, 1}, {answers, 2}, {cannotAsk, 1}, {answers, 4}, {answers, 8}, {answers, 16}, {answers, 30},
	} {
		want := step.want * time.Second
		if got := b.Next(step.rep, now); got < want-want/8 || got > want+want/8 {
			t.Errorf("step %d: %s, want %s", i, got, want)
		}
		now = now.Add(want)
	}
}
