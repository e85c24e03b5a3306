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
		r.set, r.work.next = set, time.Time{}
		if d != nil {
			r.closeDriver()
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

// Reregister makes the registration socket again, so that the kubelet registers again.
// It fails while the driver is not ready: the kubelet would only refuse.
func (r *Registrar) Reregister(ctx context.Context) error {
	var refused error
	err := r.do(ctx, func() {
		if d := r.known.report; d.Driver != status.Ready {
			refused = fmt.Errorf("cannot register %s again: the driver is %s: %s", r.name, d.Driver, d.Reason)
			return
		}
		r.wanted, r.work.next = wanted{CauseAsked, time.Now()}, time.Time{}
	})
	return errors.Join(err, refused)
}

// Alive returns nil when the registrar's goroutine runs: it does not say that the driver
// does. It causes no look at anything.
func (r *Registrar) Alive(ctx context.Context) error { return r.send(ctx, nil) }

// do runs f in the registrar's goroutine and waits for it.
func (r *Registrar) do(ctx context.Context, f func()) error {
	ran := make(chan struct{})
	if err := r.send(ctx, func() { f(); close(ran) }); err != nil {
		return err
	}
	<-ran // f waits for nothing but an Ask that was cancelled
	return nil
}

func (r *Registrar) send(ctx context.Context, cmd func()) error {
	select {
	case r.cmds <- cmd:
		return nil
	case <-r.done:
		return fmt.Errorf("%s: %w", r.name, ErrEnded)
	case <-ctx.Done():
		return fmt.Errorf("the registrar of %s does not answer: %w", r.name, context.Cause(ctx))
	}
}
