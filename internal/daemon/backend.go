package daemon

import (
	"cmp"
	"context"
	"errors"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// backend is the daemon as the control socket sees it.
type backend struct {
	*agent.Agent
	d      *daemon
	reload func(ctx context.Context, force bool) ([]string, error)
}

// Reload implements control.Backend.
func (b backend) Reload(ctx context.Context, force bool) ([]string, error) {
	return b.reload(ctx, force)
}

// aliveLimit is how long Alive waits. The agent answers in microseconds, or is stuck.
const aliveLimit = 2 * time.Second

// Alive implements control.Backend. Requests share the answers, because each one wakes the
// goroutines of all drivers.
func (b backend) Alive(ctx context.Context) error {
	return b.d.live.ask(ctx, "", func(ctx context.Context) error { return b.d.alive(ctx, aliveLimit) })
}

// Live implements control.Backend.
func (b backend) Live(ctx context.Context, name string) error {
	d, ok := b.Agent.Configured(name)
	if !ok || !d.Enabled {
		return errors.New("no enabled driver of that name is configured")
	}
	return b.d.live.ask(ctx, d.Name, func(ctx context.Context) error {
		return driver.Live(ctx, b.d.pool, d.SocketOwner, d.Socket)
	})
}

// Status implements control.Backend: the agent's document with what it does not know.
func (b backend) Status() status.Document {
	s := b.Agent.Status()
	// A flag may name another directory.
	s.PluginsRegistry = cmp.Or(safetext.Claim(b.d.parts.options.Dir), s.PluginsRegistry)
	s.NodeVolumes = b.d.volumes.look(b.d, s)
	s.Polling = b.d.watcher.Polling()
	s.LandlockABI = b.d.landlock
	for _, stuck := range b.d.pool.Stuck() {
		s.Stuck = append(s.Stuck, status.StuckCall{Path: safetext.Claim(stuck.Path), Since: status.ByWallClock(stuck.Since, time.Now())})
	}
	return s
}
