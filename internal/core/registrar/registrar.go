// Package registrar manages the registration of one driver. It looks at the driver and the
// registration socket, compares them with its table, and takes one action at a time. It
// does no I/O but its log: sockets and files are behind the interfaces Driver and Socket.
package registrar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

// Registrar runs one driver's registration. Make it with New, then call Run once.
type Registrar struct {
	log     *slog.Logger
	observe func(status.Driver)
	name    string
	begunAt time.Time
	cmds    chan func()   // run by Run
	done    chan struct{} // closed when Run has returned

	// The fields below belong to the goroutine in Run.
	table      config.Driver
	driver     Driver
	socket     Socket
	atStart    string      // the endpoint of the first table
	view       status.View // the last look at driver
	toldAt     time.Time   // when the last publication that succeeded began
	task       task
	request    pendingRequest
	introduced bool          // its first state was logged
	complaints rate.Bucket   // limits entries about problems that only a person can fix
	counted    uint64        // republications
	status     status.Driver // as last reported
}

// pendingRequest is a publication that a command or a changed configuration requested.
type pendingRequest struct {
	cause Cause // empty: none
	at    time.Time
}

// New returns a registrar for a driver's table. It owns d, but not s. log has the driver's name
// bound. observe is called at each change, from the registrar's goroutine; it must not block.
func New(table config.Driver, d Driver, s Socket, log *slog.Logger, observe func(status.Driver)) *Registrar {
	now := time.Now()
	r := &Registrar{
		log: log, observe: observe, name: table.Name, begunAt: now, cmds: make(chan func()), done: make(chan struct{}),
		table: table, atStart: table.Endpoint, driver: d, socket: s,
		view:       d.Look(),
		task:       task{done: make(chan error, 1), checkDue: true},
		complaints: rate.Bucket{Burst: 5, Interval: 10 * time.Minute},
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
		r.driver.Close()
		if r.task.busy {
			<-r.task.done
		}
	}()
	for {
		next := r.step(ctx, time.Now())
		if !r.table.Enabled && !r.task.busy && r.task.checkErr == nil && !r.socket.Look().Up {
			return // no registration is left to withdraw
		}
		select {
		case <-ctx.Done():
			return
		case <-r.driver.Hints():
		case <-r.socket.Hints():
			r.task.checkDue = true
			r.task.hinted(time.Now())
		case err := <-r.task.done:
			r.finished(err, time.Now())
		case cmd := <-r.cmds:
			cmd()
		case <-rate.At(next):
		}
	}
}

// step starts what is due, reports what changed, and returns when to call it again without an
// event; zero: never.
func (r *Registrar) step(ctx context.Context, now time.Time) time.Time {
	seen := r.socket.Look()
	if free := &r.task.freeSince; seen.Place != status.Missing {
		*free = time.Time{}
	} else if free.IsZero() {
		*free = now
	}
	r.lookAtDriver(seen, now)
	next := r.workIfDue(ctx, seen, now)
	r.updateStatus(seen, now)
	return next
}

// lookAtDriver looks at the driver.
func (r *Registrar) lookAtDriver(seen status.Socket, now time.Time) {
	r.driver.Follow(r.table.Enabled, seen.Up, r.table.ProbeEvery)
	was := &r.view
	view := r.driver.Look()
	ready := view.Driver == status.Ready
	if was.Driver == status.Ready && !(ready && view.ReadySince.Equal(was.ReadySince)) {
		r.request = pendingRequest{} // it could not be carried out meanwhile
	}
	if ready && !view.AskedAt.Equal(was.AskedAt) {
		r.task.hinted(now)
	}
	r.view = view
}

// inputs returns what decide needs.
func (r *Registrar) inputs(socket status.Socket) inputs {
	view := r.view
	if !view.ReturnedAt.After(r.toldAt) {
		view.ReturnedAt = time.Time{} // the kubelet has learned of it since
	}
	return inputs{r.table, view, socket, r.task.checkErr != nil, r.request, r.atStart}
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

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

var errEnded = errors.New("its registrar has ended")

// Update changes the table and, if d is not nil, replaces the Driver. The registrar owns d.
func (r *Registrar) Update(ctx context.Context, table config.Driver, d Driver) error {
	return r.do(ctx, func() {
		r.table = table
		r.task.commanded(time.Now())
		if d != nil {
			r.driver.Close()
			r.driver, r.view = d, d.Look()
		}
		switch n := r.socket.Look().Notification; {
		case !table.Enabled:
			r.request = pendingRequest{} // it ends with the registration
		case !n.At.IsZero() && !n.Registered:
			// the kubelet refused what the old table announced: try again
			r.request = pendingRequest{CauseChanged, time.Now()}
		}
	})
}

// Reregister recreates the registration socket, so that the kubelet registers the driver again.
// It fails if the driver is not ready. Unless force is true, it also fails if a working
// registration would be lost, because the kubelet would refuse what the driver reports now.
func (r *Registrar) Reregister(ctx context.Context, force bool) error {
	var refused error
	err := r.do(ctx, func() {
		seen := r.socket.Look()
		loss := refusedChange(seen.Announced.Identity, r.view.Known)
		switch d := r.view; {
		case d.Driver != status.Ready:
			refused = fmt.Errorf("cannot register %s again: the driver is %s: %s", r.name, d.Driver, d.Reason)
			return
		case loss != "" && seen.Up && seen.Notification.Registered && !force:
			refused = fmt.Errorf("registering %s again would end a working registration: %s; remove the label first, then use --force", r.name, loss)
			return
		}
		r.request = pendingRequest{CauseAsked, time.Now()}
		r.task.commanded(time.Now())
	})
	return errors.Join(err, refused)
}

// Alive returns nil if the registrar's goroutine responds, or has ended: then its registration was
// withdrawn. It does not ask the driver.
func (r *Registrar) Alive(ctx context.Context) error {
	if err := r.do(ctx, func() {}); !errors.Is(err, errEnded) {
		return err
	}
	return nil
}

// do runs f in the registrar's goroutine and waits for it.
func (r *Registrar) do(ctx context.Context, f func()) error {
	ran := make(chan struct{})
	select {
	case r.cmds <- func() { f(); close(ran) }:
		<-ran // f waits at most for an Ask that was canceled
		return nil
	case <-r.done:
		return fmt.Errorf("%s: %w", r.name, errEnded)
	case <-ctx.Done():
		return fmt.Errorf("the registrar of %s does not answer: %w", r.name, context.Cause(ctx))
	}
}
