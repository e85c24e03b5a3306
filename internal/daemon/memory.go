package daemon

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	settled = 5 * time.Second // without any change: the burst is over
	// between two releases, lest a driver that flaps makes us collect all the time
	releaseAgain = time.Minute
)

// releaseMemory returns the memory that a burst needed (a start, many drivers at once) to the node
// when nothing has changed for a while. The runtime would return it little by little, and wake up
// for minutes to do so. It costs one garbage collection, and no timer while nothing changes.
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
