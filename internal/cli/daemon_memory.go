package cli

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	settled   = 10 * time.Second // without any change: the burst is over
	tidyAgain = 5 * time.Minute  // between two, so that a driver which flaps does not make us collect for ever
)

// tidyMemory gives what a burst needed (a start, a storm of drivers) back to the node once
// things have settled. The runtime would keep it for minutes: the memory belongs to the
// workloads. It costs a garbage collection and no timer while nothing changes.
func (d *daemon) tidyMemory(ctx context.Context) {
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
		select {
		case <-ctx.Done():
			return
		case <-time.After(tidyAgain):
		}
	}
}
