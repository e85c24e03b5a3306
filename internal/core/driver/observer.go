package driver

import (
	"context"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

// maxRestartsKept is how many restarts of a driver are remembered, the last ones.
const maxRestartsKept = 1000

// Why is why a driver is asked.
type Why string

// The reasons.
const (
	Hinted  Why = "something may have changed"
	Due     Why = "it is time to ask again"
	Probing Why = "it is time for a Probe" // of a driver that is ready
)

// Asker queries a driver (implemented by Client).
type Asker interface {
	// Ask returns the state of the driver when it is known or ctx is done. It calls progress while
	// the driver takes long to answer. While the connection is good and the same socket is at the
	// path, it returns a Ready report again, without a call, unless Probe is to be called or a
	// Probe was not answered. A report without a state is none: the socket was replaced meanwhile,
	// which gives a hint; or nothing changed since the last answer, if Hinted, because NodeGetInfo
	// may be expensive for the driver. It runs once at a time.
	Ask(ctx context.Context, why Why, progress func(status.Report)) status.Report
	// Hints receives when Ask may return something else. Capacity one: a hint has no payload. Ask
	// receives from it, too.
	Hints() <-chan struct{}
	// Close closes the connection and ends the hints. Ask must not be running.
	Close()
}

// Observer observes a driver in a goroutine of its own: it asks when something may have changed,
// more and more rarely while the driver is not ready, and calls Probe while it is registered. It
// implements registrar.Driver.
type Observer struct {
	asker   Asker
	hints   chan struct{}
	wake    chan struct{}
	cancel  context.CancelFunc
	running sync.WaitGroup // of run

	mu         sync.Mutex // guards the following
	view       status.View
	askNow     bool
	enabled    bool
	registered bool
	probeEvery time.Duration

	// The fields below belong to run.
	next      time.Time // when to ask again without a hint; zero: never
	probeAt   time.Time // when to call Probe of a driver that is ready; zero: never
	hinted    bool      // a hint came that no query has answered yet
	limit     rate.Bucket
	backoff   backoff
	silences  int  // queries in a row that the driver did not answer
	seen      bool // it was not absent at least once
	restarted bool // it came back since it was last ready
}

// Observe returns an Observer, which owns a, and runs until Close. It asks when Follow enables it.
func Observe(a Asker) *Observer {
	ctx, cancel := context.WithCancel(context.Background()) // until Close
	now := time.Now()
	o := &Observer{
		asker: a, hints: make(chan struct{}, 1), wake: make(chan struct{}, 1), cancel: cancel,
		limit: rate.Bucket{Burst: 20, Interval: 500 * time.Millisecond}, next: now,
		view: status.View{Report: status.Report{Driver: status.Absent, Reason: "it has not answered yet"}, LastPresent: now},
	}
	o.running.Go(func() { o.run(ctx) })
	return o
}

// Close implements registrar.Driver.
func (o *Observer) Close() {
	o.cancel()
	o.running.Wait()
	o.asker.Close()
}

// Look implements registrar.Driver.
func (o *Observer) Look() status.View {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.view
}

// Hints implements registrar.Driver.
func (o *Observer) Hints() <-chan struct{} { return o.hints }

// AskNow implements registrar.Driver.
func (o *Observer) AskNow() {
	o.mu.Lock()
	o.askNow = true
	o.mu.Unlock()
	rate.Hint(o.wake)
}

// Follow implements registrar.Driver.
func (o *Observer) Follow(enabled, registered bool, probeEvery time.Duration) {
	o.mu.Lock()
	changed := o.enabled != enabled || o.registered != registered || o.probeEvery != probeEvery
	o.enabled, o.registered, o.probeEvery = enabled, registered, probeEvery
	o.mu.Unlock()
	if changed {
		rate.Hint(o.wake)
	}
}

func (o *Observer) run(ctx context.Context) {
	for ctx.Err() == nil {
		now := time.Now()
		at, byHint := o.due(now)
		if !at.IsZero() && !at.After(now) {
			o.ask(ctx, byHint, now)
			continue
		}
		select {
		case <-ctx.Done():
		case <-o.asker.Hints():
			o.hinted = true
		case <-o.wake:
		case <-rate.At(at):
		}
	}
}

// due returns when to ask, and whether only because of a hint; zero: not without an event.
func (o *Observer) due(now time.Time) (at time.Time, byHint bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.enabled {
		return time.Time{}, false
	}
	at = o.next
	if o.view.Driver == status.Ready {
		at = o.nextProbe(now)
	} else {
		o.probeAt = time.Time{}
	}
	if o.silences == 1 || o.askNow {
		at = now
	}
	if hinted := o.limit.Next(now); o.hinted && (at.IsZero() || hinted.Before(at)) {
		return hinted, true
	}
	return at, false
}

// nextProbe returns when to call Probe of a driver that is ready. These times are multiples of
// probe_every, so that drivers share wakeups.
func (o *Observer) nextProbe(now time.Time) time.Time {
	switch every := o.probeEvery; {
	case every == 0 || !o.registered:
		o.probeAt = time.Time{}
	case o.probeAt.IsZero() || o.probeAt.Sub(now) > every+every/10: // it was changed
		soonest := now.Add(every / 10) // not twice around the same multiple
		o.probeAt = soonest.Add(every - time.Duration(soonest.UnixNano())%every)
	}
	return o.probeAt
}

// ask queries the driver once.
func (o *Observer) ask(ctx context.Context, byHint bool, now time.Time) {
	why := Due
	if byHint {
		o.limit.Take(now)
		why = Hinted
	}
	if !o.probeAt.IsZero() && !o.probeAt.After(now) {
		o.probeAt = time.Time{}
		why = Probing
	}
	o.hinted = false
	o.mu.Lock()
	o.askNow = false
	o.mu.Unlock()
	rep := o.asker.Ask(ctx, why, o.slow)
	o.mu.Lock()
	defer o.mu.Unlock()
	if ctx.Err() == nil && rep.Driver != "" { // else what is due stays due
		o.answered(rep, now, time.Now())
	}
	rate.Hint(o.hints)
}

// slow shows that a driver that is not ready has not answered for a while. A hanging driver stays
// hanging until the query ends. An absent one is back: it counts as a restart.
func (o *Observer) slow(rep status.Report) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.view.Driver != status.Ready && o.view.Driver != status.Hanging {
		o.countRestart(o.view.Driver, rep, time.Now())
		o.view.Driver, o.view.Reason = rep.Driver, rep.Reason
		rate.Hint(o.hints)
	}
}

// answered records the report of a query.
func (o *Observer) answered(rep status.Report, began, now time.Time) {
	v, was := &o.view, o.view.Driver
	if rep.Silent && o.registered {
		if o.silences++; o.silences > 1 {
			rep.Driver = status.Hanging
		} else if was == status.Ready {
			return // it is hanging if the next query is not answered either
		}
	} else {
		o.silences = 0
	}
	unknown := was == status.Absent && v.AskedAt.IsZero() // no query has said anything yet
	wasAway := was != status.Ready && !unknown
	o.countRestart(was, rep, now)
	v.Report, v.AskedAt = rep, began
	if was != status.Absent || rep.Driver != status.Absent {
		v.LastPresent = now
	}
	switch rep.Driver {
	case status.Ready:
		if was != status.Ready {
			v.ReadySince = now
		}
		if wasAway || rep.Replaced {
			v.ReturnedAt = now
		}
		if !v.Known.Equal(rep.Identity) {
			v.Known, v.KnownSince = rep.Identity, now
		}
		o.next, o.backoff = time.Time{}, backoff{}
	case status.Hanging:
		o.next = now.Add(askHanging)
	default:
		o.next = now.Add(o.backoff.next(rep, now))
	}
}

// countRestart counts the times that the driver came back: it was absent before, or its socket was
// replaced too fast to see it absent.
func (o *Observer) countRestart(was status.DriverState, rep status.Report, now time.Time) {
	v := &o.view
	back := was == status.Absent && rep.Driver != status.Absent || rep.Driver == status.Ready && rep.Replaced && !o.restarted
	if back && o.seen {
		o.restarted = true
		v.RestartsTotal++
		v.Restarts = append(slices.Clone(v.Restarts[max(0, len(v.Restarts)-maxRestartsKept+1):]), now)
	}
	o.seen = o.seen || rep.Driver != status.Absent
	if rep.Driver == status.Ready {
		o.restarted = false
	}
}
