package daemon

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
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

// liveFor is how long requests share an answer.
const liveFor = time.Second

// liveness shares each driver's answers to Probe, and the agent's answers about the daemon itself,
// among all requests.
type liveness struct {
	ctx context.Context // of the Probes, which belong to no single request
	run func(func())    // runs a Probe, and waits for it at the end of the process

	mu      sync.Mutex
	answers map[string]*liveAnswer // by driver; empty: the daemon
}

func newLiveness(ctx context.Context, run func(func())) *liveness {
	return &liveness{ctx: ctx, run: run, answers: map[string]*liveAnswer{}}
}

// liveAnswer is the answer to a Probe.
type liveAnswer struct {
	done chan struct{} // closed when there is one
	at   time.Time     // zero: there is none yet
	err  error
}

// ask returns the last answer if it is at most liveFor old, otherwise that of the running Probe,
// which it starts if there is none.
func (l *liveness) ask(ctx context.Context, name string, probe func(context.Context) error) error {
	l.mu.Lock()
	a := l.answers[name]
	if a == nil || !a.at.IsZero() && time.Since(a.at) >= liveFor {
		a = &liveAnswer{done: make(chan struct{})}
		l.answers[name] = a
		l.run(func() {
			err := probe(l.ctx)
			l.mu.Lock()
			defer l.mu.Unlock()
			a.at, a.err = time.Now(), err
			close(a.done)
		})
	}
	l.mu.Unlock()
	select {
	case <-a.done:
		return a.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// leftoversAgain is the pause before leftovers that could not be removed are tried again.
const leftoversAgain = 10 * time.Second

// removeLeftovers removes what an earlier process left of drivers that the configuration does not
// have, whenever that changes. It does not delay a start.
func (r *configReloader) removeLeftovers(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-r.ready:
	}
	var c *config.Config
	var names []string // in the descriptor store
	var again <-chan time.Time
	for last := ""; ; {
		select {
		case <-ctx.Done():
			return
		case c = <-r.leftovers:
		case <-again:
		}
		again = nil
		for _, name := range r.parts.unclaimed(c) { // the store still has these listeners
			names = append(names, name)
			for _, f := range r.parts.claim(name) {
				_ = f.Close() // a copy of what the store has; no error of it matters
			}
		}
		err := r.parts.removeLeftovers(ctx, c, names)
		if err == nil {
			names, last = nil, ""
			continue
		}
		if text := err.Error(); text != last {
			last = text
			r.note("remove what an earlier process left", err)
		}
		again = time.After(leftoversAgain)
	}
}
