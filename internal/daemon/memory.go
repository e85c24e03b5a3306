package daemon

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	settled      = 5 * time.Second // without any change: the burst is over
	releaseAgain = time.Minute     // between two, so that a driver which flaps does not make us collect for ever
)

// gcPercent is the garbage that may lie beside what is in use, for debug.SetGCPercent. Of few drivers it is
// what their registration makes: collected meanwhile it would take 2 of its 5 ms. Of many it is little,
// for then the burst at the start leaves a less scattered heap: 0.6 MiB less with 20, 1.9 with 100.
func gcPercent(drivers int) int {
	if drivers > 10 {
		return 25
	}
	return 75
}

// releaseMemory gives what a burst needed (a start, a storm of drivers) back to the node once
// things have settled. The runtime would keep it for minutes: the memory belongs to the
// workloads. It costs a garbage collection, and no timer while nothing changes.
func (d *daemon) releaseMemory(ctx context.Context) {
	for {
		changed := d.agent.Changed()
		select {
		case <-ctx.Done():
			return
		case <-changed:
			continue
		case <-time.After(settled):
		}
		debug.FreeOSMemory()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		pause(ctx, releaseAgain)
	}
}
