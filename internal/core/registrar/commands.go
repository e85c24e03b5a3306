package registrar

import (
	"context"
	"errors"
	"fmt"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

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
