package agent

import (
	"context"
	"errors"
	"fmt"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/status"
)

// running is a registrar and what belongs to it.
type running struct {
	key
	driver config.Driver // under Agent.apply; not enabled: its registration is being withdrawn
	reg    *registrar.Registrar
	socket Socket
	ended  chan struct{} // closed when the registrar has ended and the socket is closed
	status status.Driver // under Agent.mu
}

// start starts a registrar. One that is not enabled is only withdrawn.
func (a *Agent) start(k key, d config.Driver, socket Socket) {
	r := &running{key: k, driver: d, socket: socket, ended: make(chan struct{})}
	var driver registrar.Driver = absentDriver{}
	if d.Enabled {
		driver = a.parts.Driver(d)
	}
	log := a.log.With("driver", d.Name)
	r.reg = registrar.New(k.kubelet, d, driver, socket, registrar.Options{
		Log: log, Observe: func(s status.Driver) { a.change(func() { r.status = s }) },
	})
	a.change(func() { a.running[k] = r })
	a.ended.Go(func() {
		r.reg.Run(a.ctx)
		if a.ctx.Err() == nil {
			socket.Discard()
		}
		if err := socket.Close(context.WithoutCancel(a.ctx)); err != nil {
			log.Error("cannot end a registration cleanly", "error", err)
		}
		var other *running
		a.change(func() {
			delete(a.running, k) // no other takes its place before r.ended is closed
			other = a.running[key{k.name, a.config.Kubelet}]
		})
		close(r.ended)
		if other != nil {
			other.socket.Restore()
		}
		a.hint() // it may have been enabled again
	})
}

// absentDriver is the driver of a registration that is only withdrawn.
type absentDriver struct{}

func (absentDriver) Ask(context.Context, func(status.Report)) status.Report { return status.Report{} }
func (absentDriver) Probe(context.Context) status.Report                    { return status.Report{} }
func (absentDriver) AskAfterHint(context.Context, func(status.Report)) status.Report {
	return status.Report{}
}
func (absentDriver) Hints() <-chan struct{} { return nil }
func (absentDriver) Close()                 {}

// awaitEnd waits until r has ended or ctx is done; it reports whether r has ended.
func (r *running) awaitEnd(ctx context.Context) bool {
	select {
	case <-r.ended:
		return true
	case <-ctx.Done():
	}
	select {
	case <-r.ended:
		return true
	default:
		return false
	}
}

// awaitWithdrawal waits up to leaveTime until all are withdrawn.
func (a *Agent) awaitWithdrawal(ctx context.Context, leaving []*running) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	var errs []error
	for _, r := range leaving {
		if !r.awaitEnd(ctx) {
			a.mu.Lock()
			reason := r.status.Reason
			a.mu.Unlock()
			errs = append(errs, fmt.Errorf("%s is not withdrawn yet, trying again: %s", r.name, reason))
		}
	}
	return errors.Join(errs...)
}

// update passes a changed table to its registrar, with a new client if the driver must be found
// or checked in another way. It returns false if the registrar is ending. One that was to be
// withdrawn, and is not yet, continues.
func (a *Agent) update(r *running, d config.Driver) bool {
	if r.driver.Equal(d) {
		return true
	}
	var client registrar.Driver
	if r.driver.Connection != d.Connection {
		client = a.parts.Driver(d)
	}
	if err := r.reg.Update(a.ctx, d, client); err != nil {
		a.log.Debug("a registrar ended before it could be changed", "driver", d.Name, "error", err)
		if client != nil {
			client.Close()
		}
		return false
	}
	r.driver = d
	return true
}
