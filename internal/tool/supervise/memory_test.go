package supervise

import (
	"context"
	"runtime"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"
)

// wasteful is a driver whose Probe leaves a megabyte of garbage.
type wasteful struct {
	*fakeDriver
	garbage []byte
}

func (d *wasteful) Live(ctx context.Context) error {
	d.garbage = make([]byte, 1<<20)
	return d.fakeDriver.Live(ctx)
}

// Watch runs for as long as the driver.
func TestWatchFreesMemory(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // only Watch frees memory
	synctest.Test(t, func(t *testing.T) {
		s, d, _ := newSupervisor(10 * time.Second)
		s.Live = (&wasteful{fakeDriver: d}).Live
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		s.Watch(ctx)
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		if d.calls < 50 || m.HeapAlloc > 20<<20 {
			t.Errorf("%d MiB of the heap are in use after %d probes", m.HeapAlloc>>20, d.calls)
		}
	})
}
