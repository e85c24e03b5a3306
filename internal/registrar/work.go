package registrar

import (
	"context"
	"errors"
	"time"

	"csi-registrar/internal/status"
)

// How soon what failed is tried again without a hint.
const (
	retryAfterError    = time.Second // as a full disk, which no hint will end
	retryConflictFirst = 400 * time.Millisecond
	retryConflictMost  = 30 * time.Second // doubling up to here: each costs the other one a connection
	retryHinted        = 50 * time.Millisecond
)

// working is the worker that looks at the registration socket and changes it.
type working struct {
	busy      bool
	changes   bool // what it does is a change; else a Check
	done      chan error
	startedAt time.Time
	checkDue  bool      // a hint came that no Check has answered yet
	checkErr  error     // why the last Check failed; nil after a success
	err       error     // why the last change failed; nil after a success
	failures  int       // conflicts in a row, for the backoff
	next      time.Time // no change before this
	pending   action    // what is to be done, …
	since     time.Time // … and since when
	churn     churn
}

// workIfDue starts the one thing that all that is known asks for, and returns when to look
// again.
func (r *Registrar) workIfDue(ctx context.Context, seen status.Socket, now time.Time) time.Time {
	w := &r.work
	if w.busy {
		return time.Time{}
	}
	if w.checkDue {
		w.checkDue = false
		r.begin(now, false, func() error { return r.socket.Check(ctx) })
		return time.Time{}
	}
	act := r.decide(seen, now)
	if !act.same(w.pending) {
		w.since = now
	}
	w.pending = act
	if act.kind == rest {
		w.err = nil // what failed is not wanted any more
		return act.at
	}
	due := w.next
	if w.err == nil { // else it was let pass already, and is tried again
		due = later(due, r.dueAt(now))
	}
	if due.After(now) {
		return due
	}
	switch act.kind {
	case publish:
		r.count(act, now)
		a := r.announcement()
		r.begin(now, true, func() error { return r.socket.Publish(ctx, a) })
	case withdraw:
		r.log.Info("withdrawing", "cause", string(act.cause), "reason", act.why)
		r.begin(now, true, func() error { return r.socket.Withdraw(ctx) })
	case acknowledge:
		r.begin(now, true, func() error { return r.socket.Acknowledge(ctx, act.note) })
	}
	return time.Time{}
}

// dueAt is when the pending action may be done.
func (r *Registrar) dueAt(now time.Time) time.Time {
	w := &r.work
	at := w.since.Add(w.pending.quiet)
	if w.pending.kind == publish && w.pending.cause != CauseAsked {
		at = later(at, w.churn.next(w.since, now))
	}
	return at
}

// dampedUntil is when the pending publication is done, if it waits only because there were
// too many; else zero.
func (r *Registrar) dampedUntil(now time.Time) time.Time {
	w := &r.work
	if w.pending.kind != publish || w.busy || w.err != nil || w.churn.count(now) < churnFree {
		return time.Time{}
	}
	if at := r.dueAt(now); at.After(now) {
		return at
	}
	return time.Time{}
}

func (r *Registrar) begin(now time.Time, changes bool, do func() error) {
	r.work.busy, r.work.changes, r.work.startedAt = true, changes, now
	go func() { r.work.done <- do() }()
}

// count counts a publication before it is tried; a first one is no republication.
func (r *Registrar) count(act action, now time.Time) {
	if r.work.err != nil {
		return // this is the same cause, tried again
	}
	if act.cause != CauseAsked {
		r.work.churn.add(now)
	}
	if act.cause == CauseFirst {
		return
	}
	r.counted[string(act.cause)]++
	r.log.Info("republishing the registration socket", "MESSAGE_ID", MessageRepublished, "cause", string(act.cause), "reason", act.why)
}

// finished takes in how the work ended.
func (r *Registrar) finished(err error, now time.Time) {
	w := &r.work
	w.busy = false
	if errors.Is(err, context.Canceled) {
		return
	}
	if !w.changes {
		w.checkErr = err
		return
	}
	w.err, w.next = err, time.Time{}
	switch {
	case err == nil:
		w.failures = 0
		if !r.wanted.at.After(w.startedAt) {
			r.wanted = wanted{} // else it was asked for again meanwhile
		}
		if !r.known.returnedAt.After(w.startedAt) {
			r.known.returnedAt = time.Time{}
		}
		w.pending = action{}
	case isConflict(err):
		w.next = now.Add(jitter(min(retryConflictFirst<<min(w.failures, 10), retryConflictMost)))
		w.failures++
	default:
		w.next = now.Add(jitter(retryAfterError))
	}
}

// retrySoon makes a hint count: what failed is tried again at once, but not more often than
// once in 50 ms, so that somebody who plays with the directory cannot keep us busy.
func (r *Registrar) retrySoon(now time.Time) {
	if r.work.err == nil {
		return
	}
	if soon := now.Add(retryHinted); r.work.next.After(soon) {
		r.work.next = soon
	}
}

func isConflict(err error) bool {
	var c interface{ Conflict() bool }
	return errors.As(err, &c) && c.Conflict()
}
