// Package registrar is the life of one driver's registration: it looks at the driver, at
// the registration socket and at what is wanted, and decides one action at a time. It
// knows no sockets, no files and no systemd; those come in through Driver and Socket.
package registrar

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"time"

	"csi-registrar/internal/status"
)

// Settings is what the configuration says of the driver; the agent fills it in.
type Settings struct {
	Name          string
	Socket        string
	Endpoint      string        // what the kubelet is told
	LinkTarget    string        // where the link at Endpoint is to point; empty: it is no link of ours
	Versions      []string      // what the kubelet is told
	Withdraw      bool          // withdraw a driver that is gone; else its registration is kept
	WithdrawAfter time.Duration // how long it may be gone
	// Leaving: the driver is no longer configured, or disabled. Its registration is withdrawn,
	// and Run returns when it is.
	Leaving bool
}

// Registrar runs one driver's registration. Make it with New, then call Run once.
type Registrar struct {
	log     *slog.Logger
	observe func(status.Driver)
	name    string
	cmds    chan func()   // nil: only to see that it runs
	done    chan struct{} // closed when Run has returned

	// All below belongs to the goroutine that is in Run.
	set     Settings
	driver  Driver
	socket  Socket
	ask     asking
	known   known
	work    working
	wanted  wanted
	logged  logged
	counted map[string]uint64 // republications by Cause
	status  status.Driver     // as it was handed out last
}

// wanted is a publication that a command or a change of the configuration asked for.
type wanted struct {
	cause Cause // empty: none
	at    time.Time
}

// Options are the Registrar's surroundings.
type Options struct {
	Log     *slog.Logger        // with the driver's name bound
	Observe func(status.Driver) // called at each change, from the registrar's goroutine; must not block
}

// New makes a registrar; it owns d from now on, but not s.
func New(set Settings, d Driver, s Socket, o Options) *Registrar {
	now := time.Now()
	r := &Registrar{
		log: o.Log, observe: o.Observe, name: set.Name, cmds: make(chan func()), done: make(chan struct{}),
		set: set, driver: d, socket: s,
		ask:     asking{answers: make(chan *answer), next: now, limit: pace{burst: 20, every: 500 * time.Millisecond}},
		known:   known{report: status.Report{Driver: status.Absent, Reason: "it has not answered yet"}, lastPresent: now},
		work:    working{done: make(chan error, 1), checkDue: true},
		logged:  logged{complaints: pace{burst: 5, every: 10 * time.Minute}},
		counted: map[string]uint64{},
	}
	r.tell(s.Look(), now)
	return r
}

// Run lives the registration until ctx is done, or until it is withdrawn if it is leaving.
// Otherwise the registration socket is left as it is: whether that stays or goes is for its
// owner to say.
func (r *Registrar) Run(ctx context.Context) {
	defer close(r.done)
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		r.closeDriver()
		if r.work.busy {
			<-r.work.done
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		next := r.step(ctx, now)
		if r.left() {
			return
		}
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(next.Sub(now))
		}
		if !r.wait(ctx, timer.C) {
			return
		}
	}
}

// wait waits until something happened that is worth a step; false when ctx is done.
func (r *Registrar) wait(ctx context.Context, timer <-chan time.Time) bool {
	hints := r.driver.Hints()
	if r.ask.cancel != nil {
		hints = nil // Ask receives them
	}
	for {
		select {
		case <-ctx.Done():
			return false
		case <-hints:
			r.ask.hinted = true
		case <-r.socket.Hints():
			r.work.checkDue = true
			r.retrySoon(time.Now())
		case a := <-r.ask.answers:
			r.answered(a, time.Now())
		case err := <-r.work.done:
			r.finished(err, time.Now())
		case cmd := <-r.cmds:
			if cmd == nil {
				continue
			}
			cmd()
		case <-timer:
		}
		return true
	}
}

// step looks at everything, begins what is due, tells what changed, and returns when to
// look again without a hint; zero: not by time.
func (r *Registrar) step(ctx context.Context, now time.Time) time.Time {
	seen := r.socket.Look()
	next := earliest(r.askIfDue(ctx, seen, now), r.workIfDue(ctx, seen, now))
	r.tell(seen, now)
	return next
}

// left reports whether a registrar that is leaving has nothing left to do.
func (r *Registrar) left() bool {
	return r.set.Leaving && !r.work.busy && !r.work.checkDue && r.work.err == nil && r.work.checkErr == nil && !r.socket.Look().Up
}

// tell hands out a new snapshot if anything in it changed, and writes the transition to
// the log.
func (r *Registrar) tell(seen status.Socket, now time.Time) {
	next := r.snapshot(seen, now)
	prev := r.status
	if reflect.DeepEqual(prev, next) {
		return
	}
	r.status = next
	r.logTransition(prev, next, now)
	r.observe(next)
}

func jitter(d time.Duration) time.Duration {
	return d - d/8 + rand.N(d/4)
}

// earliest is the earlier of two times, of which zero means never.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
