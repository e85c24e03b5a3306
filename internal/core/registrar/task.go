package registrar

import (
	"context"
	"errors"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

// The pauses before a failed change is retried without a hint double from First to Most.
const (
	retryErrorFirst     = time.Second // such as a full disk, after which no hint comes
	retryErrorMost      = 30 * time.Second
	retryWithdrawalMost = time.Minute
	retryConflictFirst  = 400 * time.Millisecond
	retryConflictMost   = 10 * time.Second      // each retry asks the other registrar
	retryHinted         = 50 * time.Millisecond // after a hint
)

type taskKind int

const (
	checking taskKind = iota
	clearing          // the path, before a publication
	changing          // the socket
)

// task is the state of the goroutine that checks and changes the registration socket.
type task struct {
	busy      bool
	kind      taskKind
	done      chan error
	changedAt time.Time // when the last change began
	checkDue  bool      // a hint came that no Check has answered yet
	checkErr  error     // of the last Check
	err       error     // of the last try of the pending action; nil: there was none
	failures  int       // of the pending action in a row, for the backoff
	failedAt  time.Time // when the first of them happened
	next      time.Time // no change before this, unless a hint or a command asks for one
	soonest   time.Time // not even then: a try that fails can cause a hint itself
	retryAt   time.Time // for a hint or a command since the last try began; zero: none
	pending   action    // the action to take
	counted   bool      // it is a publication that was tried
	limit     publicationKind
	since     time.Time // when it became pending, unless there is nothing to do
	made      publications
	taken     bool      // another registrar had the path since the last publication
	freeSince time.Time // when nothing was at the path any more; zero: something is
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
		r.begin(now, checking, func() error { return r.socket.Check(ctx) })
		return time.Time{}
	}
	act := decide(r.inputs(seen), now)
	if act.kind == nothing && t.checkErr != nil {
		return act.next // until the next Check nothing is known to be needed
	}
	if act.cause == CauseFirst && t.pending.kind == publish && t.err != nil {
		act = t.pending // the try that failed has removed the old socket
	} else {
		t.limit = kindOf(act.cause, seen.Notification)
	}
	if act != t.pending {
		t.since = now
	}
	switch {
	case act.kind != t.pending.kind:
		t.err, t.failures, t.next, t.counted = nil, 0, time.Time{}, false
	case act.kind == publish && act.cause != t.pending.cause:
		t.err, t.counted = nil, false // another publication
	}
	t.pending = act
	if act.kind == nothing {
		return act.next
	}
	due := t.next
	if due.After(now) && !t.retryAt.IsZero() {
		due = rate.Earliest(due, later(t.retryAt, t.soonest))
	}
	if t.err == nil {
		due = later(due, t.since.Add(act.quiet))
	}
	if t.err == nil || t.taken {
		due = later(due, t.allowedAt(now))
	}
	if due.After(now) {
		return due
	}
	switch a := r.inputs(seen).announcement(); {
	case act.cause == CauseGone && r.view.AskedAt.Before(due):
		// The last report can be outdated: at the start there is none, and the driver can have come
		// back while the daemon was frozen or could not withdraw. Ask it again first.
		r.driver.AskNow()
		return time.Time{}
	case act.kind == publish && t.taken && seen.Place == status.Foreign:
		r.begin(now, clearing, func() error { return r.socket.Clear(ctx, a) })
	case act.kind == publish:
		if !t.counted && act.cause != CauseFirst { // the first one is no republication
			t.counted = true
			r.counted++
			r.log.Info("republishing the registration socket", "MESSAGE_ID", messageRepublished, "cause", string(act.cause), "reason", act.reason)
		}
		r.begin(now, changing, func() error { return r.socket.Publish(ctx, a) })
	default:
		if t.err == nil {
			r.log.Info("withdrawing", "cause", string(act.cause), "reason", act.reason)
		}
		r.begin(now, changing, func() error { return r.socket.Withdraw(ctx) })
	}
	return time.Time{}
}

// publicationKind returns the kind of the pending publication.
func (t *task) publicationKind() publicationKind {
	if t.taken {
		return retake
	}
	return t.limit
}

// allowedAt returns when the pending action may be taken if it has to wait because there were too
// many publications; zero: it need not.
func (t *task) allowedAt(now time.Time) time.Time {
	if t.pending.kind != publish || t.pending.cause == CauseAsked {
		return time.Time{}
	}
	return t.made.next(t.publicationKind(), t.since, t.freeSince, now)
}

// dampedUntil returns when the pending publication is made if it waits only because there
// were too many, else zero.
func (t *task) dampedUntil(now time.Time) time.Time {
	at := t.allowedAt(now)
	if t.busy || t.err != nil || !at.After(now) {
		return time.Time{}
	}
	return at
}

func (r *Registrar) begin(now time.Time, kind taskKind, do func() error) {
	if r.task.busy, r.task.kind = true, kind; kind != checking {
		r.task.changedAt, r.task.retryAt = now, time.Time{}
	}
	go func() { r.task.done <- do() }()
}

// finished handles the end of a task.
func (r *Registrar) finished(err error, now time.Time) {
	t := &r.task
	t.busy = false
	if errors.Is(err, context.Canceled) {
		return
	}
	if t.kind == checking {
		t.checkErr = err
		// An abandoned call may have completed the publication that failed.
		late := t.err != nil && t.pending.kind == publish && r.socket.Look().PublishedAt.After(t.changedAt)
		if err != nil || !late {
			return
		}
	}
	if t.next = (time.Time{}); err == nil && t.kind == clearing {
		t.failures = 0 // now the publication can be made, when that is allowed
		return
	}
	t.err = err
	if err == nil {
		done := t.pending.kind
		if kind := t.publicationKind(); done == publish && (kind == retake || t.pending.cause != CauseAsked) {
			t.made[kind] = append(t.made[kind], now)
		}
		t.taken = t.taken && done != publish
		t.failures, t.pending, t.counted = 0, action{}, false
		if !r.request.at.After(t.changedAt) { // else it came during this change
			r.request = pendingRequest{}
		}
		r.toldAt = t.changedAt
		return
	}
	if t.failures == 0 {
		t.failedAt = now
	}
	first, most := retryErrorFirst, retryErrorMost
	switch {
	case isConflict(err):
		t.taken = true
		first, most = retryConflictFirst, retryConflictMost
	case t.pending.kind == withdraw:
		most = retryWithdrawalMost
		if t.failures == 0 || r.complaints.Allow(now) {
			r.log.Warn("cannot withdraw the registration, trying again", "error", err)
		}
	}
	t.next, t.soonest = now.Add(rate.Jitter(min(first<<min(t.failures, 10), most), now)), now.Add(first)
	t.failures++
}

// hinted moves the next try of a change up because of a hint. It does not retry withdrawals: they
// rarely fail for a reason that a hint can end.
func (t *task) hinted(now time.Time) {
	if t.pending.kind != withdraw {
		t.retryAt = rate.Earliest(t.retryAt, now.Add(retryHinted))
	}
}

// commanded moves the next try of a change up because of a command.
func (t *task) commanded(now time.Time) { t.retryAt = rate.Earliest(t.retryAt, now) }

func isConflict(err error) bool {
	var c interface{ Conflict() bool }
	return errors.As(err, &c) && c.Conflict()
}

// Driver is a CSI driver (implemented by driver.Observer).
type Driver interface {
	// Look returns what is known of the driver, from memory.
	Look() status.View
	// Hints receives when Look may return something else. Capacity one: a hint has no payload.
	Hints() <-chan struct{}
	// AskNow asks the driver again, without waiting for the answer.
	AskNow()
	// Follow sets whether the driver is asked at all, and whether it is registered: then Probe is
	// called each probeEvery (0: never), and it is Hanging after two calls without an answer.
	Follow(enabled, registered bool, probeEvery time.Duration)
	// Close ends the goroutine, the connection and the hints.
	Close()
}

// Socket is the registration socket of a driver (implemented by regsocket.Socket). All methods but
// Look and Hints may block for a limited time; they are called one at a time.
type Socket interface {
	// Look returns the state of the socket from memory.
	Look() status.Socket
	// Check examines the path and updates what Look returns. After an error Look returns what
	// was found before.
	Check(ctx context.Context) error
	// Publish puts a new socket in place that reports the announcement, and replaces the
	// current one, if any. An error with a method Conflict() bool that returns true means
	// that another registrar has the path or the name.
	Publish(ctx context.Context, a status.Announcement) error
	// Clear removes what Publish would remove of others at the path, and fails as Publish does if
	// that is not possible.
	Clear(ctx context.Context, a status.Announcement) error
	// Withdraw removes the path if it is ours, then the listener and its entry in the
	// descriptor store. Without a published socket it does nothing. If the path cannot be
	// removed, everything stays as it is.
	Withdraw(ctx context.Context) error
	// Hints receives when Check may find something else, or the kubelet called.
	Hints() <-chan struct{}
}
