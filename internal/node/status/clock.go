package status

import "time"

// ByWallClock returns t in UTC. If the wall clock was set after t was taken, it returns the time
// that is as long before now, by the wall clock of now.
func ByWallClock(t, now time.Time) time.Time {
	if t.IsZero() {
		return t.UTC()
	}
	// The clocks are read one after the other, so they always differ a little.
	if by := now.Add(t.Sub(now)); by.Round(0).Sub(t.Round(0)).Abs() > time.Second {
		t = by
	}
	return t.UTC()
}
