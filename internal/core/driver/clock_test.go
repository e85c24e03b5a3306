package driver

import (
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// A restart is as old after the wall clock was set.
func TestRestartsKeepTheirAge(t *testing.T) {
	o, now := &Observer{seen: true}, time.Now()
	o.countRestart(status.Absent, status.Report{Driver: status.Ready}, now)
	later := fake.WithWallClock(now.Add(11*time.Minute), -time.Hour)
	if r := o.view.Restarts; len(r) != 1 || later.Sub(r[0]) != 11*time.Minute {
		t.Errorf("restarts %s, at %s", r, later)
	}
}
