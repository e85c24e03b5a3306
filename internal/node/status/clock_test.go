package status

import (
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// The times that are shown stay right when the wall clock is set.
func TestByWallClock(t *testing.T) {
	now := time.Now()
	at := now.Add(-10 * time.Minute)
	for name, c := range map[string]struct{ at, want time.Time }{
		"never":              {},
		"not set":            {at, at},
		"set back an hour":   {fake.WithWallClock(at, time.Hour), at},
		"set forward a year": {fake.WithWallClock(at, -365*24*time.Hour), at},
		"set by half second": {at.Round(0).Add(500 * time.Millisecond), at.Round(0).Add(500 * time.Millisecond)},
		"yet to come":        {fake.WithWallClock(now.Add(time.Minute), time.Hour), now.Add(time.Minute)},
		"of another process": {at.UTC().Round(0), at},
	} {
		if got := ByWallClock(c.at, now); !got.Equal(c.want.Round(0)) || got.Location() != time.UTC {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
