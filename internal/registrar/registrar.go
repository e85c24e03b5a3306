// Package registrar is the life of one driver's registration: it looks at the driver, at
// the registration socket and at what is wanted, and decides one action at a time. It
// knows no sockets, no files and no systemd; those come in through Driver and Socket.
package registrar

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"time"

	"csi-registrar/internal/status"
)

// How often a driver is asked again. A hint always comes first; these are the net below
// it. All are jittered by a quarter, so that many drivers do not fall into step.
const (
	askAgain     = time.Second      // a driver that accepts but is not ready (spec §5)
	absentFirst  = time.Second      // a driver that is not there: doubling …
	absentMost   = 30 * time.Second // … up to here (spec §5)
	rivalAgain   = 400 * time.Millisecond
	publishAgain = time.Second // after an error that no hint will end, as a full disk
)

// Settings is what the configuration says of the driver; the agent fills it in.
type Settings struct {
	Name          string
	Socket        string
	Endpoint      string        // what the kubelet is told
	Versions      []string      // what the kubelet is told
	Withdraw      bool          // withdraw a driver that is gone; else its registration is kept
	WithdrawAfter time.Duration // how long it may be gone
}

// Registrar runs one driver's registration. Make it with New, then call Run once.
type Registrar struct {
	log     *slog.Logger
	observe func(status.Driver)
	cmds    chan func()
	done    chan struct{} // closed when Run has returned

	// All below belongs to the goroutine that is in Run.
	set    Settings
	driver Driver
	socket Socket

	asking   context.CancelFunc // not nil while the driver's lane is busy
	asked    chan status.Report
	began    time.Time // when the round of questions that runs, or ran last, began
	told     time.Time // when the round began that report is of; zero: none yet
	askNext  time.Time // when to ask again without a hint; zero: not by time
	hinted   bool      // a hint came that no Ask has answered yet
	tries    int       // rounds without success, for the backoff
	hintAsks bucket    // asks that were caused by hints, so that a driver which flaps cannot keep us busy
	report   status.Report
	identity status.Identity // of the last Ready report
	known    bool            // identity is set
	heardAt  time.Time       // when the last report came
	taken    status.Identity // what the kubelet was last seen to have learned from the driver itself …
	takenBy  time.Time       // … and when it said yes to that; zero: only what it was told
	start    time.Time       // when this registrar was made
	lastUp   time.Time       // when the driver was last not absent, or the start
	returned time.Time       // when the driver came back; zero: the kubelet has learned of it

	working    bool // the socket's lane is busy
	worked     chan error
	workNext   time.Time // no work before this
	workErr    error     // why the last attempt failed; nil after a success
	wanted     Cause     // asked for by a command: publish anew
	wantedAt   time.Time // when it was
	restores   bucket
	changes    bucket
	complaints bucket            // lines of the log about what only a person can mend
	republish  map[string]uint64 // by Cause

	status     status.Driver
	introduced bool // the log has an entry of the first state
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
		log: o.Log, observe: o.Observe,
		cmds: make(chan func()), done: make(chan struct{}),
		set: set, driver: d, socket: s,
		asked: make(chan status.Report, 1), worked: make(chan error, 1),
		askNext:    now,
		report:     status.Report{Driver: status.Absent, Reason: "it has not answered yet"},
		start:      now,
		lastUp:     now,
		hintAsks:   newBucket(20, 500*time.Millisecond),
		restores:   newBucket(10, time.Second),
		changes:    newBucket(3, 30*time.Second),
		complaints: newBucket(5, 10*time.Minute),
		republish:  map[string]uint64{},
	}
	r.tell(r.look(), now)
	return r
}

// Run lives the registration until ctx is done. It leaves the registration socket as it
// is: whether that stays or goes is for its owner to say.
func (r *Registrar) Run(ctx context.Context) {
	defer close(r.done)
	work, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		r.settle()
		if err := r.driver.Close(); err != nil {
			r.log.Debug("closing the connection to the driver", "error", err)
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		next := r.step(work, now)
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(next.Sub(now))
		}
		select {
		case <-ctx.Done():
			return
		case <-r.driverHints():
			r.hinted = true
		case <-r.socket.Hints():
			r.hurry(time.Now())
		case rep := <-r.asked:
			r.heard(rep, time.Now())
		case err := <-r.worked:
			r.finished(err, time.Now())
		case cmd := <-r.cmds:
			cmd()
		case <-timer.C:
		}
		r.moreHints()
	}
}

// moreHints takes in what else was hinted: a change often shows at the driver and at the
// registration socket, and one look serves both.
func (r *Registrar) moreHints() {
	select {
	case <-r.driverHints():
		r.hinted = true
	default:
	}
	select {
	case <-r.socket.Hints():
		r.hurry(time.Now())
	default:
	}
}

// step looks at everything, begins what is due, tells what changed, and returns when to
// look again without a hint; zero: not by time.
func (r *Registrar) step(ctx context.Context, now time.Time) time.Time {
	seen := r.look()
	next := earliest(r.askIfDue(ctx, now), r.workIfDue(ctx, seen, now))
	r.tell(seen, now)
	return next
}

// look is a look at the registration socket with times that can be counted from, and with
// what the kubelet learned since. A time yet to come is of an earlier process, under a wall
// clock that was ahead: it was before this one began.
func (r *Registrar) look() status.Socket {
	seen, now := r.socket.Look(), time.Now()
	for _, at := range []*time.Time{&seen.PublishedAt, &seen.GetInfoAt, &seen.Word.At} {
		if at.After(now) {
			*at = r.start
		}
	}
	r.learned(seen)
	if r.takenBy.After(seen.PublishedAt) {
		seen.Announced.Identity = r.taken
	}
	return seen
}

// learned notes what the kubelet took when it said yes again to the same socket, as it does
// when it was restarted: it asks the driver itself, so if the driver told us before, and is
// still the same, it told the kubelet that.
func (r *Registrar) learned(seen status.Socket) {
	w := seen.Word
	if !w.Registered || w.At.Equal(r.takenBy) || !seen.GetInfoAt.After(r.heardAt) || seen.GetInfoAt.After(w.At) {
		return
	}
	if r.report.Driver == status.Ready && r.asking == nil && !r.hinted {
		r.taken, r.takenBy = r.identity, w.At
	}
}

// settle waits for both lanes; their context is cancelled.
func (r *Registrar) settle() {
	r.stopAsking()
	if r.working {
		<-r.worked
		r.working = false
	}
}

// ErrEnded is wrapped where a registrar is asked whose Run has returned.
var ErrEnded = errors.New("its registrar has ended")

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
