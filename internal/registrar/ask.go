package registrar

import (
	"context"
	"time"

	"csi-registrar/internal/status"
)

// How often a driver is asked again. A hint always comes first; these are the net below it.
// All are jittered by a quarter, so that many drivers do not fall into step.
const (
	askStarting    = time.Second // a driver that accepts but is not ready
	askAbsentFirst = time.Second // a driver that is not there: doubling up to
	askAbsentMost  = 30 * time.Second
)

// asking is the worker that asks the driver.
type asking struct {
	cancel    context.CancelFunc // not nil while it works
	answers   chan *answer
	startedAt time.Time // when the Ask that runs, or ran last, began
	next      time.Time // when to ask again without a hint; zero: not by time
	hinted    bool      // a hint came that no Ask has answered yet
	failures  int       // Asks without an answer in a row, for the backoff
	limit     pace      // of Asks because of hints
}

// answer is what the worker tells of an Ask, in order.
type answer struct {
	status.Report
	final bool // else what is known while the driver takes long
}

// known is what is known of the driver.
type known struct {
	report        status.Report
	startedAt     time.Time       // when the Ask began that report is of; zero: none yet
	identity      status.Identity // of the last Ready report; without a name: none yet
	identitySince time.Time       // when it was heard first
	lastPresent   time.Time       // when the driver was last not absent, or the start
	returnedAt    time.Time       // when it came back; zero: the kubelet has learned of it since
}

// closeDriver ends an Ask, and the connection to the driver.
func (r *Registrar) closeDriver() {
	if r.ask.cancel != nil {
		r.ask.cancel()
		for !(<-r.ask.answers).final {
		}
		r.ask.cancel = nil
	}
	if err := r.driver.Close(); err != nil {
		r.log.Debug("closing the connection to the driver", "error", err)
	}
}

// askIfDue starts an Ask if one is due, and returns when the next is.
func (r *Registrar) askIfDue(ctx context.Context, seen status.Socket, now time.Time) time.Time {
	if r.ask.cancel != nil || r.set.Leaving {
		return time.Time{}
	}
	due := r.ask.next
	if r.known.report.Driver == status.Ready {
		due = time.Time{}
		if r.unverified(seen) {
			due = now
		}
	}
	byHint := false
	if at := r.ask.limit.next(now); r.ask.hinted && (due.IsZero() || at.Before(due)) {
		due, byHint = at, true
	}
	if gone := r.goneAt(); r.known.startedAt.Before(gone) {
		due = earliest(due, gone) // it is only withdrawn on what it says then
	}
	if due.IsZero() || due.After(now) {
		return due
	}
	if byHint {
		r.ask.limit.take(now)
	}
	r.ask.hinted, r.ask.startedAt = false, now
	asking, cancel := context.WithCancel(ctx)
	r.ask.cancel = cancel
	driver := r.driver
	go func() {
		rep := driver.Ask(asking, func(rep status.Report) { r.ask.answers <- &answer{rep, false} })
		r.ask.answers <- &answer{rep, true}
	}()
	return time.Time{}
}

// answered takes in an answer.
func (r *Registrar) answered(a *answer, now time.Time) {
	rep := a.Report
	if !a.final {
		if r.known.report.Driver != status.Ready {
			r.known.report.Driver, r.known.report.Reason = rep.Driver, rep.Reason
		}
		return
	}
	r.ask.cancel()
	r.ask.cancel = nil
	h, was := &r.known, r.known.report.Driver
	wasAway := was != status.Ready && !h.startedAt.IsZero()
	h.report, h.startedAt = rep, r.ask.startedAt
	if was != status.Absent || rep.Driver != status.Absent {
		h.lastPresent = now
	}
	if was == status.Ready && rep.Driver != status.Ready {
		r.ask.failures, r.wanted = 0, wanted{} // what was asked for cannot be done now
	}
	switch rep.Driver {
	case status.Ready:
		if wasAway || rep.Replaced {
			h.returnedAt = now
		}
		if !h.identity.Equal(rep.Identity) {
			h.identity, h.identitySince = rep.Identity, now
		}
		r.ask.failures, r.ask.next = 0, time.Time{}
		r.retrySoon(now)
	case status.Starting:
		r.ask.failures = 0
		r.ask.next = now.Add(jitter(askStarting))
	default:
		r.ask.next = now.Add(jitter(min(askAbsentFirst<<min(r.ask.failures, 10), askAbsentMost)))
		r.ask.failures++
	}
}

// unverified reports whether the kubelet accepted the registration again, as it does when it
// was restarted, and the driver has not been asked since: the kubelet asks the driver itself,
// so what it has learned is known when the driver says the same after that as before.
func (r *Registrar) unverified(seen status.Socket) bool {
	n := seen.Notification
	return n.Registered && n.At.After(r.known.startedAt) && !seen.Announced.Identity.Equal(r.known.identity)
}

// learned reports whether the kubelet has learned the driver's identity of now by itself.
func (r *Registrar) learned(seen status.Socket) bool {
	h, n := &r.known, seen.Notification
	return n.Registered && h.report.Driver == status.Ready && !seen.Announced.Identity.Equal(h.identity) &&
		h.identitySince.Before(seen.GetInfoAt) && !seen.GetInfoAt.After(n.At) && !h.startedAt.Before(n.At)
}
