package registrar

import (
	"context"
	"errors"
	"maps"
	"time"

	"csi-registrar/internal/node/status"
)

// The pauses before a failed change is retried without a hint double from First to Most.
const (
	retryErrorFirst     = time.Second // such as a full disk, after which no hint comes
	retryErrorMost      = 30 * time.Second
	retryWithdrawalMost = time.Minute
	retryConflictFirst  = 400 * time.Millisecond
	retryConflictMost   = 30 * time.Second // each retry connects to the other registrar
	retryHinted         = 50 * time.Millisecond
)

// task is the state of the goroutine that checks and changes the registration socket.
type task struct {
	busy      bool
	changes   bool // it changes the socket; else it is a Check
	done      chan error
	changedAt time.Time // when the last change began
	checkDue  bool      // a hint came that no Check has answered yet
	checkErr  error     // of the last Check
	err       error     // of the last try of the pending action; nil: there was none
	failures  int       // of the pending action in a row, for the backoff
	failedAt  time.Time // when the first of them happened
	next      time.Time // no change before this
	pending   action    // the action to take
	since     time.Time // when it became pending
	churn     churn
}

// workIfDue starts a Check or the action that decide returns, if it is due. It returns when to
// call it again without an event.
func (r *Registrar) workIfDue(ctx context.Context, seen status.Socket, now time.Time) time.Time {
	t := &r.task
	if t.busy {
		return time.Time{}
	}
	if t.checkDue {
		t.checkDue = false
		r.begin(now, false, func() error { return r.socket.Check(ctx) })
		return time.Time{}
	}
	act := decide(r.inputs(seen), now)
	if act.kind == nothing && t.checkErr != nil {
		return act.next // until the next Check nothing is known to be needed
	}
	if !act.same(t.pending) {
		t.since = now
	}
	switch {
	case act.kind != t.pending.kind:
		t.err, t.failures, t.next = nil, 0, time.Time{}
	case act.kind == publish && act.cause != t.pending.cause:
		t.err = nil // another publication, which is counted
	}
	t.pending = act
	if act.kind == nothing {
		return act.next
	}
	due := t.next
	if t.err == nil {
		due = later(due, r.dueAt(now))
	}
	if due.After(now) {
		return due
	}
	switch act.kind {
	case publish:
		r.count(act, now)
		a := r.inputs(seen).announcement()
		r.begin(now, true, func() error { return r.socket.Publish(ctx, a) })
	case withdraw:
		if t.err == nil {
			r.log.Info("withdrawing", "cause", string(act.cause), "reason", act.reason)
		}
		r.begin(now, true, func() error { return r.socket.Withdraw(ctx) })
	case acknowledge:
		r.begin(now, true, func() error { return r.socket.Acknowledge(ctx, act.note) })
	}
	return time.Time{}
}

// dueAt returns when the pending action may be taken.
func (r *Registrar) dueAt(now time.Time) time.Time {
	t := &r.task
	at := t.since.Add(t.pending.quiet)
	if t.pending.kind == publish && t.pending.cause != CauseAsked {
		at = later(at, t.churn.next(t.since, now))
	}
	return at
}

// dampedUntil returns when the pending publication is made if it waits only because there
// were too many, else zero.
func (r *Registrar) dampedUntil(now time.Time) time.Time {
	t := &r.task
	if t.pending.kind != publish || t.busy || t.err != nil || t.churn.count(now) < churnFree {
		return time.Time{}
	}
	if at := r.dueAt(now); at.After(now) {
		return at
	}
	return time.Time{}
}

func (r *Registrar) begin(now time.Time, changes bool, do func() error) {
	if r.task.busy, r.task.changes = true, changes; changes {
		r.task.changedAt = now
	}
	go func() { r.task.done <- do() }()
}

// count counts a publication before it is tried. The first one is not a republication.
func (r *Registrar) count(act action, now time.Time) {
	if r.task.err != nil {
		return
	}
	if act.cause != CauseAsked {
		r.task.churn = append(r.task.churn, now)
	}
	if act.cause == CauseFirst {
		return
	}
	r.counted = maps.Clone(r.counted)
	r.counted[string(act.cause)]++
	r.log.Info("republishing the registration socket", "MESSAGE_ID", messageRepublished, "cause", string(act.cause), "reason", act.reason)
}

// finished handles the end of a task.
func (r *Registrar) finished(err error, now time.Time) {
	t := &r.task
	t.busy = false
	if errors.Is(err, context.Canceled) {
		return
	}
	if !t.changes {
		t.checkErr = err
		// An abandoned call may have completed the publication that failed.
		late := t.err != nil && t.pending.kind == publish && r.socket.Look().PublishedAt.After(t.changedAt)
		if err != nil || !late {
			return
		}
	}
	t.err, t.next = err, time.Time{}
	if err == nil {
		done := t.pending.kind
		t.failures, t.pending = 0, action{}
		if done == acknowledge { // the kubelet learned nothing new
			return
		}
		if !r.request.at.After(t.changedAt) {
			r.request = pendingRequest{} // else there is a newer request
		}
		if !r.view.returnedAt.After(t.changedAt) {
			r.view.returnedAt = time.Time{}
		}
		return
	}
	if t.failures == 0 {
		t.failedAt = now
	}
	first, most := retryErrorFirst, retryErrorMost
	switch {
	case isConflict(err):
		first, most = retryConflictFirst, retryConflictMost
	case t.pending.kind == withdraw:
		most = retryWithdrawalMost
		if t.failures == 0 || r.history.complaints.allow(now) {
			r.log.Warn("cannot withdraw the registration, trying again", "error", err)
		}
	}
	t.next = now.Add(jitter(min(first<<min(t.failures, 10), most), now))
	t.failures++
}

// retrySoon retries a failed change because of a hint, after retryHinted: changes in the
// directory cannot keep the registrar busy. It does not retry withdrawals: they rarely fail for a
// reason that a hint can end.
func (r *Registrar) retrySoon(now time.Time) {
	if r.task.err == nil || r.task.pending.kind == withdraw {
		return
	}
	if soon := now.Add(retryHinted); r.task.next.After(soon) {
		r.task.next = soon
	}
}

func isConflict(err error) bool {
	var c interface{ Conflict() bool }
	return errors.As(err, &c) && c.Conflict()
}
