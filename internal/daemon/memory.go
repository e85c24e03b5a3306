package daemon

import (
	"context"
	"runtime/debug"
	"time"

	"csi-registrar/internal/sys/rate"
)

const (
	settled = 5 * time.Second // without any change: the burst is over
	// the time between two releases, so that a driver that flaps does not cause one collection
	// after another
	releaseAgain = time.Minute
)

// releaseMemory returns memory to the node when nothing has changed for a while after a burst (a
// start, many drivers at once). The runtime would return it slowly, and wake up for minutes to do
// so. It costs one garbage collection, and no timer while nothing changes.
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
		rate.Pause(ctx, releaseAgain)
	}
}
