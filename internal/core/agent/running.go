package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// running is a registrar and what belongs to it.
type running struct {
	driver config.Driver // under Agent.apply; not enabled: its registration is being withdrawn
	reg    *registrar.Registrar
	socket Socket
	ended  chan struct{} // closed when the registrar has ended and the socket is closed
	status status.Driver // under Agent.mu
}

// start starts a registrar.
func (a *Agent) start(d config.Driver, socket Socket) {
	r := &running{driver: d, socket: socket, ended: make(chan struct{})}
	log := a.log.With("driver", d.Name)
	r.reg = registrar.New(d, a.parts.Driver(d), socket, log, func(s status.Driver) {
		a.change(func() { r.status = s })
	})
	a.change(func() { a.running[d.Name] = r })
	a.ended.Go(func() {
		r.reg.Run(a.ctx)
		if err := socket.Close(context.WithoutCancel(a.ctx), a.ctx.Err() == nil); err != nil {
			log.Error("cannot end a registration cleanly", "error", err)
		}
		// no other takes its place before r.ended is closed
		a.change(func() { delete(a.running, d.Name) })
		close(r.ended)
		a.hint() // it may have been enabled again
	})
}

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

// awaitWithdrawal waits up to leaveTime until all are withdrawn. The error names a few that are
// not.
func (a *Agent) awaitWithdrawal(ctx context.Context, leaving []*running) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	const mostNamed = 3
	var left []string
	reason := ""
	for _, r := range leaving {
		if r.awaitEnd(ctx) {
			continue
		}
		left = append(left, r.driver.Name)
		a.mu.Lock()
		reason = cmp.Or(reason, r.status.WithdrawalError)
		a.mu.Unlock()
	}
	if len(left) == 0 {
		return nil
	}
	slices.Sort(left)
	text := fmt.Sprintf("%d withdrawals go on: %s", len(left), strings.Join(left[:min(len(left), mostNamed)], ", "))
	if len(left) > mostNamed {
		text += ", …"
	}
	if reason != "" {
		text += " (" + reason + ")"
	}
	return errors.New(text)
}

// update passes a changed table to its registrar, with a new client if the driver must be found
// or checked in another way. It returns false if the registrar is ending. One that was to be
// withdrawn, and is not yet, continues.
func (a *Agent) update(r *running, d config.Driver) bool {
	r.driver.KeptFor = d.KeptFor // no setting of the registrar
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
