package registrar

import (
	"context"
	"errors"
	"fmt"
	"time"

	"csi-registrar/internal/status"
)

// ErrEnded is wrapped where a registrar is asked whose Run has returned.
var ErrEnded = errors.New("its registrar has ended")

// Update changes what is wanted. A nil Driver keeps the one that there is; another one
// takes its place, and is owned by the registrar from now on.
func (r *Registrar) Update(ctx context.Context, set Settings, d Driver) error {
	return r.do(ctx, func() {
		r.set = set
		r.work.next = time.Time{}
		if d != nil {
			r.stopAsking()
			if err := r.driver.Close(); err != nil {
				r.log.Debug("closing the connection to the driver", "error", err)
			}
			r.driver, r.known.startedAt = d, time.Time{}
			r.ask.next, r.ask.failures = time.Now(), 0
			if r.known.report.Driver == status.Ready {
				r.known.report = status.Report{Driver: status.Starting, Reason: "asked again because its configuration changed"}
			}
		}
		if n := r.socket.Look().Notification; !n.At.IsZero() && !n.Registered {
			r.wanted = wanted{CauseChanged, time.Now()} // where the kubelet had refused, another try
		}
	})
}

// Leave has the registration withdrawn; Run returns when it is.
func (r *Registrar) Leave(ctx context.Context) error {
	return r.do(ctx, func() {
		r.stopAsking()
		r.set.Leaving, r.wanted, r.work.next = true, wanted{}, time.Time{}
	})
}

// Reregister makes the registration socket again, so that the kubelet registers again.
// It fails while the driver is not ready: the kubelet would only refuse.
func (r *Registrar) Reregister(ctx context.Context) error {
	var refused error
	err := r.do(ctx, func() {
		if d := r.known.report; d.Driver != status.Ready {
			refused = fmt.Errorf("cannot register %s again: the driver is %s: %s", r.set.Name, d.Driver, d.Reason)
			return
		}
		r.wanted, r.work.next = wanted{CauseAsked, time.Now()}, time.Time{}
	})
	return errors.Join(err, refused)
}

// Done is closed when Run has returned.
func (r *Registrar) Done() <-chan struct{} { return r.done }

// Alive returns nil when the registrar's goroutine runs: it does not say that the driver
// does. It causes no look at anything.
func (r *Registrar) Alive(ctx context.Context) error {
	select {
	case r.pings <- struct{}{}:
		return nil
	case <-r.done:
		return fmt.Errorf("%s: %w", r.set.Name, ErrEnded)
	case <-ctx.Done():
		return r.silent(ctx)
	}
}

// do runs f in the registrar's goroutine and waits for it.
func (r *Registrar) do(ctx context.Context, f func()) error {
	ran := make(chan struct{})
	select {
	case r.cmds <- func() { f(); close(ran) }:
		<-ran // f waits for nothing but an Ask that was cancelled
		return nil
	case <-r.done:
		return fmt.Errorf("%s: %w", r.set.Name, ErrEnded)
	case <-ctx.Done():
		return r.silent(ctx)
	}
}

func (r *Registrar) silent(ctx context.Context) error {
	return fmt.Errorf("the registrar of %s does not answer: %w", r.set.Name, context.Cause(ctx))
}
