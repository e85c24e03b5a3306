// Package registrar manages the registration of one driver. It observes the driver and the
// registration socket, compares them with its table, and takes one action at a time. It
// does no I/O but its log: sockets and files are behind the interfaces Driver and Socket.
package registrar

import (
	"context"
	"log/slog"
	"reflect"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// Registrar runs one driver's registration. Make it with New, then call Run once.
type Registrar struct {
	log     *slog.Logger
	observe func(status.Driver)
	kubelet config.Kubelet
	name    string
	cmds    chan func()   // run by Run
	done    chan struct{} // closed when Run has returned

	// The fields below belong to the goroutine in Run.
	table   config.Driver
	driver  Driver
	socket  Socket
	query   query
	view    driverView
	task    task
	request pendingRequest
	history logHistory
	counted map[string]uint64 // republications by Cause; not changed in place
	status  status.Driver     // as last reported
}

// pendingRequest is a publication that a command or a changed configuration requested.
type pendingRequest struct {
	cause Cause // empty: none
	at    time.Time
}

// Options are the options of New; both are required.
type Options struct {
	Log *slog.Logger // with the driver's name bound
	// called at each change, from the registrar's goroutine; must not block
	Observe func(status.Driver)
}

// New returns a registrar for a driver's table and a kubelet. It owns d, but not s.
func New(k config.Kubelet, table config.Driver, d Driver, s Socket, o Options) *Registrar {
	now := time.Now()
	r := &Registrar{
		log: o.Log, observe: o.Observe, kubelet: k, name: table.Name, cmds: make(chan func()), done: make(chan struct{}),
		table: table, driver: d, socket: s,
		query:   query{answers: make(chan answer), next: now, hintLimit: tokenBucket{burst: 20, interval: 500 * time.Millisecond}},
		view:    driverView{report: status.Report{Driver: status.Absent, Reason: "it has not answered yet"}, lastPresent: now},
		task:    task{done: make(chan error, 1), checkDue: true},
		history: logHistory{complaints: tokenBucket{burst: 5, interval: 10 * time.Minute}},
		counted: map[string]uint64{},
	}
	r.updateStatus(s.Look(), now)
	return r
}

// Run manages the registration until ctx is done, or until it is withdrawn because the table is not
// enabled. Otherwise it leaves the registration socket as it is for the socket's owner.
func (r *Registrar) Run(ctx context.Context) {
	defer close(r.done)
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		r.closeDriver()
		if r.task.busy {
			<-r.task.done
		}
	}()
	for {
		now := time.Now()
		next := r.step(ctx, now)
		if r.withdrawn() {
			return
		}
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(next.Sub(now))
		}
		if !r.wait(ctx, due) {
			return
		}
	}
}

// wait waits for the next event and handles it. It returns false when ctx is done.
func (r *Registrar) wait(ctx context.Context, due <-chan time.Time) bool {
	hints := r.driver.Hints()
	if r.query.cancel != nil {
		hints = nil // Ask receives them
	}
	select {
	case <-ctx.Done():
		return false
	case <-hints:
		r.query.hinted = true
	case <-r.socket.Hints():
		r.task.checkDue = true
		r.retrySoon(time.Now())
	case a := <-r.query.answers:
		r.answered(a, time.Now())
	case err := <-r.task.done:
		r.finished(err, time.Now())
	case cmd := <-r.cmds:
		cmd()
	case <-due:
	}
	return true
}

// step starts what is due, reports what changed, and returns when to call it again without an
// event; zero: never.
func (r *Registrar) step(ctx context.Context, now time.Time) time.Time {
	seen := r.socket.Look()
	next := earliest(r.askIfDue(ctx, seen, now), r.workIfDue(ctx, seen, now))
	r.updateStatus(seen, now)
	return next
}

// inputs returns what decide needs.
func (r *Registrar) inputs(socket status.Socket) inputs {
	return inputs{r.kubelet, r.table, r.view, r.query.cancel != nil, socket, r.task.checkErr != nil, r.request}
}

// withdrawn reports whether the table is not enabled and no registration is left to withdraw.
func (r *Registrar) withdrawn() bool {
	return !r.table.Enabled && !r.task.busy && !r.task.checkDue && r.task.err == nil && r.task.checkErr == nil && !r.socket.Look().Up
}

// updateStatus reports and logs the new status if it changed.
func (r *Registrar) updateStatus(seen status.Socket, now time.Time) {
	next := r.snapshot(seen, now)
	if reflect.DeepEqual(&r.status, &next) { // nearly always
		return
	}
	prev := r.status
	r.status = next
	r.logTransition(prev, next, now)
	r.observe(next)
}

// earliest returns the earlier of two times, where zero means never.
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
