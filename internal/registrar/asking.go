package registrar

import (
	"context"
	"time"

	"csi-registrar/internal/status"
)

// driverHints is nil while Ask runs, which receives them itself.
func (r *Registrar) driverHints() <-chan struct{} {
	if r.asking != nil {
		return nil
	}
	return r.driver.Hints()
}

func (r *Registrar) stopAsking() {
	if r.asking != nil {
		r.asking()
		<-r.asked
		r.asking = nil
	}
}

// askIfDue starts a round of questions if one is due, and tells when the next is.
func (r *Registrar) askIfDue(ctx context.Context, now time.Time) time.Time {
	if r.asking != nil {
		return time.Time{}
	}
	due := r.askNext
	if r.report.Driver == status.Ready {
		due = time.Time{}
		if r.hinted {
			due = r.hintAsks.next(now)
		}
	} else if r.hinted {
		due = earliest(due, r.hintAsks.next(now))
	}
	if gone := r.goneAt(); r.told.Before(gone) {
		due = earliest(due, gone) // it is only withdrawn on what it says then
	}
	if due.IsZero() || due.After(now) {
		return due
	}
	if r.hinted || r.report.Driver == status.Ready {
		r.hintAsks.take(now)
	}
	r.hinted, r.began = false, now
	ask, cancel := context.WithCancel(ctx)
	r.asking = cancel
	driver := r.driver
	go func() { r.asked <- driver.Ask(ask, nil) }()
	return time.Time{}
}

// heard takes in what the driver answered.
func (r *Registrar) heard(rep status.Report, now time.Time) {
	r.asking()
	r.asking = nil
	was := r.report
	gone := was.Driver != status.Ready && !r.told.IsZero()
	r.report, r.told, r.heardAt = rep, r.began, now
	if was.Driver != status.Absent || rep.Driver != status.Absent {
		r.lastUp = now
	}
	if was.Driver == status.Ready && rep.Driver != status.Ready {
		r.tries, r.wanted = 0, "" // what was asked for cannot be done now
	}
	switch rep.Driver {
	case status.Ready:
		if gone || rep.Replaced {
			r.returned = now
		}
		r.identity, r.known = rep.Identity, true
		r.tries, r.askNext = 0, time.Time{}
		r.hurry(now)
	case status.Starting:
		r.askNext = now.Add(jitter(askAgain))
		r.tries = 0
	default:
		wait := min(absentFirst<<min(r.tries, 10), absentMost)
		r.askNext = now.Add(jitter(wait))
		r.tries++
	}
}
