package registrar

import (
	"context"
	"slices"
	"time"

	"csi-registrar/internal/node/status"
)

// maxRestarts is how many restarts of a driver are remembered, the last ones.
const maxRestarts = 1000

// query is the state of the goroutine that asks the driver.
type query struct {
	cancel    context.CancelFunc // not nil while it runs
	answers   chan answer
	startedAt time.Time // when the current or last Ask began
	next      time.Time // when to ask again without a hint; zero: never
	hinted    bool      // a hint came that no Ask has answered yet
	backoff   Backoff
	silences  int         // Asks in a row that the driver did not answer
	probeAt   time.Time   // when to call Probe of a driver that is ready; zero: never
	hintLimit tokenBucket // of Asks caused by hints
}

// answer is a report of an Ask.
type answer struct {
	status.Report
	final bool // else an intermediate report of an Ask that takes long
}

// driverView has the last report of the driver and its history.
type driverView struct {
	report status.Report
	// when the Ask that returned report began; zero: none has returned
	askedAt       time.Time
	identity      status.Identity // of the last Ready report; without a name: there was none
	identitySince time.Time       // when the driver first reported it
	lastPresent   time.Time       // when the driver was last not absent, or the start
	returnedAt    time.Time       // when it came back; zero: the kubelet has learned of it since
	seen          bool            // it was not absent at least once
	restarted     bool            // it came back since it was last ready
	restarts      []time.Time     // oldest first; not changed in place
	restartsTotal uint64
}

// closeDriver ends a running Ask and the connection to the driver.
func (r *Registrar) closeDriver() {
	if r.query.cancel != nil {
		r.query.cancel()
		for !(<-r.query.answers).final {
		}
		r.query.cancel = nil
	}
	r.driver.Close()
}

// askIfDue starts an Ask if one is due, and returns when the next is.
func (r *Registrar) askIfDue(ctx context.Context, seen status.Socket, now time.Time) time.Time {
	if r.query.cancel != nil || !r.table.Enabled {
		return time.Time{}
	}
	due := r.query.next
	if r.view.report.Driver == status.Ready {
		due = r.nextProbe(seen, now)
	}
	if r.query.silences == 1 || r.view.report.Driver == status.Ready && r.inputs(seen).unverified(now) {
		due = now
	}
	byHint := false
	if at := r.query.hintLimit.next(now); r.query.hinted && (due.IsZero() || at.Before(due)) {
		due, byHint = at, true
	}
	if gone := r.inputs(seen).goneAt(); r.view.askedAt.Before(gone) {
		due = earliest(due, gone) // it is only withdrawn if that Ask finds it absent
	}
	if due.IsZero() || due.After(now) {
		return due
	}
	query := r.driver.Ask
	if byHint {
		r.query.hintLimit.take(now)
		query = r.driver.AskAfterHint
	}
	r.query.hinted, r.query.startedAt = false, now
	askCtx, cancel := context.WithCancel(ctx)
	r.query.cancel = cancel
	driver := r.driver
	ask := func() status.Report {
		return query(askCtx, func(rep status.Report) { r.query.answers <- answer{rep, false} })
	}
	if probeAt := r.query.probeAt; !probeAt.IsZero() && !probeAt.After(now) {
		r.query.probeAt = time.Time{}
		ask = func() status.Report { return driver.Probe(askCtx) }
	}
	go func() { r.query.answers <- answer{ask(), true} }()
	return time.Time{}
}

// nextProbe returns when to call Probe of a driver that is ready and registered. These times
// are multiples of probe_every, so that drivers share wakeups.
func (r *Registrar) nextProbe(seen status.Socket, now time.Time) time.Time {
	every := r.table.ProbeEvery
	switch {
	case every == 0 || !seen.Up:
		r.query.probeAt = time.Time{}
	case r.query.probeAt.IsZero():
		soonest := now.Add(every / 10) // not twice around the same multiple
		r.query.probeAt = soonest.Add(every - time.Duration(soonest.UnixNano())%every)
	}
	return r.query.probeAt
}

// answered handles an answer.
func (r *Registrar) answered(a answer, now time.Time) {
	rep := a.Report
	if !a.final {
		if r.view.report.Driver != status.Ready {
			r.view.report.Driver, r.view.report.Reason = rep.Driver, rep.Reason
		}
		return
	}
	r.query.cancel()
	r.query.cancel = nil
	if rep.Repeated { // what is due stays due
		return
	}
	v, was := &r.view, r.view.report.Driver
	if rep.Silent && r.socket.Look().Up {
		if r.query.silences++; r.query.silences > 1 {
			rep.Driver = status.Hanging
		} else if was == status.Ready {
			return // it is hanging if the next Ask is not answered either
		}
	} else {
		r.query.silences = 0
	}
	wasAway := was != status.Ready && !v.askedAt.IsZero()
	r.countRestart(was, rep, now)
	v.report, v.askedAt = rep, r.query.startedAt
	if was != status.Absent || rep.Driver != status.Absent {
		v.lastPresent = now
	}
	if was == status.Ready && rep.Driver != status.Ready {
		r.request = pendingRequest{} // it cannot be carried out now
	}
	switch rep.Driver {
	case status.Ready:
		if wasAway || rep.Replaced {
			v.returnedAt = now
		}
		if !v.identity.Equal(rep.Identity) {
			v.identity, v.identitySince = rep.Identity, now
		}
		r.query.next, r.query.backoff = time.Time{}, Backoff{}
		r.retrySoon(now)
	case status.Hanging:
		r.query.next = now.Add(askHanging)
	default:
		r.query.next = now.Add(r.query.backoff.Next(rep, now))
	}
}

// countRestart counts the times that the driver came back: it was absent before, or its socket was
// replaced too fast to see it absent.
func (r *Registrar) countRestart(was status.DriverState, rep status.Report, now time.Time) {
	v := &r.view
	back := was == status.Absent && rep.Driver != status.Absent || rep.Driver == status.Ready && rep.Replaced && !v.restarted
	if back && v.seen {
		v.restarted = true
		v.restartsTotal++
		v.restarts = append(slices.Clone(v.restarts[max(0, len(v.restarts)-maxRestarts+1):]), now.UTC())
	}
	v.seen = v.seen || rep.Driver != status.Absent
	if rep.Driver == status.Ready {
		v.restarted = false
	}
}
