package cli

import (
	"runtime"
	"runtime/debug"
	"testing"

	"csi-registrar/internal/fake"
	"csi-registrar/internal/worker"
)

// TestProbesLeaveNoMemoryInTheFeeder: the process that stays with a driver probes it for months.
func TestProbesLeaveNoMemoryInTheFeeder(t *testing.T) {
	d := fake.NewDriver(fake.ShortDir(t)+"/csi.sock", fake.Healthy("a.example"))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	defer d.Kill()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // only Live frees memory
	live := func() uint64 {
		for range 50 {
			if err := (frugalDriver{superviseDriver{d.Socket, worker.NewPool()}}).Live(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := live()
	if after := live(); after > before+500<<10 {
		t.Errorf("%d kB of the heap are in use, %d after the first probes", after>>10, before>>10)
	}
}
