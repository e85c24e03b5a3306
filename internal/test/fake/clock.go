package fake

import (
	"strings"
	"time"
	"unsafe"
)

// WithWallClock returns t, which time.Now returned, as it would be if the wall clock had been ahead
// by the given time, in whole seconds. Its monotonic part stays.
func WithWallClock(t time.Time, ahead time.Duration) time.Time {
	if !strings.Contains(t.String(), " m=") {
		panic("fake: " + t.String() + " has no monotonic part")
	}
	out := t
	// The seconds of the wall clock are bits 30 to 62 of the first word (time.Time.wall).
	*(*uint64)(unsafe.Pointer(&out)) += uint64(ahead/time.Second) << 30
	if !out.Round(0).Equal(t.Round(0).Add(ahead)) || out.Sub(t) != 0 {
		panic("fake: time.Time has changed")
	}
	return out
}
