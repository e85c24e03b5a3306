package registrar

import (
	"context"
	"errors"
	"time"

	"csi-registrar/internal/status"
)

// workIfDue starts the one action that the whole of what is known asks for, and tells
// when to look again.
func (r *Registrar) workIfDue(ctx context.Context, seen status.Socket, now time.Time) time.Time {
	if r.working {
		return time.Time{}
	}
	act := r.decide(seen, now)
	if act.kind == rest {
		r.workErr = nil // what failed is not wanted any more
		return act.at
	}
	due := r.workNext
	if r.workErr == nil { // else it was let pass already, and is tried again
		due = later(due, act.at)
	}
	if due.After(now) {
		return due
	}
	switch act.kind {
	case publish:
		r.count(act, seen, now)
		a := r.announcement()
		r.begin(func() error { return r.socket.Publish(ctx, a) })
	case withdraw:
		r.log.Info("withdrawing", "cause", string(act.cause), "reason", act.why)
		r.begin(func() error { return r.socket.Withdraw(ctx) })
	}
	return time.Time{}
}

func (r *Registrar) begin(do func() error) {
	r.working = true
	go func() { r.worked <- do() }()
}

// count keeps the books of a publication before it is tried: a first one is none.
func (r *Registrar) count(act action, seen status.Socket, now time.Time) {
	if r.workErr != nil {
		return // this is the same cause, tried again
	}
	switch act.cause {
	case CauseFirst:
		return
	case CauseRemoved, CauseReplaced:
		r.restores.take(now)
	case CauseChanged, CauseReturned, CauseSilent:
		r.changes.take(now)
	}
	r.republish[string(act.cause)]++
	r.log.Info("publishing anew", "MESSAGE_ID", MessageRepublished, "cause", string(act.cause), "reason", act.why)
}

// finished takes in how the action ended.
func (r *Registrar) finished(err error, now time.Time) {
	r.working = false
	if errors.Is(err, context.Canceled) {
		return
	}
	r.workErr = err
	switch {
	case err == nil:
		r.workNext = time.Time{}
		r.wanted, r.returned = "", time.Time{}
	case isConflict(err):
		r.workNext = now.Add(jitter(rivalAgain))
	default:
		r.workNext = now.Add(jitter(publishAgain))
	}
}

// hurry makes a hint count: what failed is tried again at once, but not more often than
// once in 50 ms, so that somebody who plays with the folder cannot keep us busy.
func (r *Registrar) hurry(now time.Time) {
	if r.workErr == nil {
		return
	}
	if soon := now.Add(50 * time.Millisecond); r.workNext.After(soon) {
		r.workNext = soon
	}
}

func isConflict(err error) bool {
	var c interface{ Conflict() bool }
	return errors.As(err, &c) && c.Conflict()
}
