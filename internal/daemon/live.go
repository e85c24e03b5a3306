package daemon

import (
	"context"
	"sync"
	"time"
)

const (
	// liveFor is how long requests share an answer.
	liveFor = time.Second
	// maxLiveWaiting limits how many requests wait for one answer; more get the last one.
	maxLiveWaiting = 64
)

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

// liveAnswer is the last answer of a driver, and the running Probe.
type liveAnswer struct {
	at      time.Time // zero: no answer yet
	err     error
	running chan struct{} // closed at the end of the running Probe; nil: none
	waiting int
}

// ask returns the last answer if it is at most liveFor old, otherwise that of the running Probe,
// which it starts if there is none. If too many requests are waiting, it returns the last answer,
// if there is one, however old.
func (l *liveness) ask(ctx context.Context, name string, probe func(context.Context) error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.answers[name]
	if a == nil {
		a = &liveAnswer{}
		l.answers[name] = a
	}
	if !a.at.IsZero() && (time.Since(a.at) < liveFor || a.waiting >= maxLiveWaiting) {
		return a.err
	}
	if a.running == nil {
		done := make(chan struct{})
		a.running = done
		l.run(func() {
			defer close(done)
			err := probe(l.ctx)
			l.mu.Lock()
			defer l.mu.Unlock()
			a.at, a.err, a.running = time.Now(), err, nil
		})
	}
	running := a.running
	a.waiting++
	l.mu.Unlock()
	select {
	case <-running:
	case <-ctx.Done():
	}
	l.mu.Lock()
	a.waiting--
	if ctx.Err() != nil && a.at.IsZero() {
		return context.Cause(ctx)
	}
	return a.err
}
