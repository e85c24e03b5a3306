package daemon

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	// gcPercent lets a burst of drivers leave a less scattered heap: 0.6 MiB less with 20 drivers,
	// 1.9 with 100. A daemon that is mostly idle does not notice what the collections cost.
	gcPercent = 25

	settled      = 5 * time.Second // without any change: the burst is over
	releaseAgain = time.Minute     // between two, so that a driver which flaps does not make us collect for ever
)

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
