package daemon

import (
	"cmp"
	"context"
	"errors"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/status"
)

// backend is the daemon as the control socket sees it.
type backend struct {
	*agent.Agent
	d      *daemon
	reload func(context.Context) error
}

// Reload implements control.Backend.
func (b backend) Reload(ctx context.Context) error { return b.reload(ctx) }

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

// Trace implements control.Backend. The journal names the user who records the calls between
// kubelet and driver.
func (b backend) Trace(ctx context.Context, rec control.Recorder) error {
	log, linked := b.d.log.With("driver", rec.Driver, "process", rec.Process), false
	err := b.Record(ctx, rec.Driver, rec.Listen, func() {
		linked = true
		log.Info("the kubelet's calls to the driver are recorded", "MESSAGE_ID", messageTraceBegin)
		rec.Linked()
	})
	if linked {
		log.Info("the kubelet's calls go to the driver again", "MESSAGE_ID", messageTraceEnd, "cause", context.Cause(ctx))
	}
	return err
}

// Status implements control.Backend: the agent's document with what it does not know.
func (b backend) Status() status.Document {
	s := b.Agent.Status()
	// A flag may name another directory.
	s.PluginsRegistry = cmp.Or(b.d.parts.options.Dir, s.PluginsRegistry)
	s.Polling = b.d.watcher.Polling()
	s.LandlockABI = b.d.landlock
	for _, stuck := range b.d.pool.Stuck() {
		s.Stuck = append(s.Stuck, status.StuckCall{Path: stuck.Path, Since: stuck.Since.UTC()})
	}
	return s
}
