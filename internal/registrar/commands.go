package registrar

import (
	"context"
	"errors"
	"fmt"
	"time"

	"csi-registrar/internal/status"
)

// Update changes what is wanted. A nil Driver keeps the one that there is; another one
// takes its place, and is owned by the registrar from now on.
func (r *Registrar) Update(ctx context.Context, set Settings, d Driver) error {
	return r.do(ctx, func() {
		r.set = set
		r.workNext = time.Time{}
		if d != nil {
			r.stopAsking()
			if err := r.driver.Close(); err != nil {
				r.log.Debug("closing the connection to the driver", "error", err)
			}
			r.driver, r.told = d, time.Time{}
			r.askNext, r.tries = time.Now(), 0
			if r.report.Driver == status.Ready {
				r.report = status.Report{Driver: status.Starting, Reason: "asked again because its configuration changed"}
			}
		}
		r.refusedAnew(CauseChanged)
	})
}

// refusedAnew wants another try where the kubelet had refused.
func (r *Registrar) refusedAnew(c Cause) {
	if w := r.socket.Look().Word; !w.At.IsZero() && !w.Registered {
		r.wanted, r.wantedAt = c, time.Now()
	}
}

// Reregister makes the registration socket anew, so that the kubelet registers again.
// It fails while the driver is not ready: the kubelet would only refuse.
func (r *Registrar) Reregister(ctx context.Context) error {
	var refused error
	err := r.do(ctx, func() {
		if r.report.Driver != status.Ready {
			refused = fmt.Errorf("cannot register %s again: the driver is %s: %s", r.set.Name, r.report.Driver, r.report.Reason)
			return
		}
		r.wanted, r.wantedAt, r.workNext = CauseAsked, time.Now(), time.Time{}
	})
	return errors.Join(err, refused)
}

// Alive returns nil when the registrar's goroutine runs: it does not say that the
// driver does.
func (r *Registrar) Alive(ctx context.Context) error {
	return r.do(ctx, func() {})
}

// do runs f in the registrar's goroutine and waits for it.
func (r *Registrar) do(ctx context.Context, f func()) error {
	ran := make(chan struct{})
	select {
	case r.cmds <- func() { f(); close(ran) }:
		<-ran // f never blocks on anything that is not ours
		return nil
	case <-r.done:
		return fmt.Errorf("%s: %w", r.set.Name, ErrEnded)
	case <-ctx.Done():
		return fmt.Errorf("the registrar of %s does not answer: %w", r.set.Name, context.Cause(ctx))
	}
}
