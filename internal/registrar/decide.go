package registrar

import (
	"fmt"
	"time"

	"csi-registrar/internal/status"
)

// Cause is why a registration socket is published, republished or withdrawn; it is a label of
// the metric republications_total and stands in the log.
type Cause string

// The causes.
const (
	CauseFirst    Cause = "first"          // nothing was published yet
	CauseRemoved  Cause = "removed"        // somebody removed the socket, or its directory
	CauseReplaced Cause = "replaced"       // something else is at its path
	CauseChanged  Cause = "changed"        // the kubelet must learn something new
	CauseAsked    Cause = "asked"          // reregister
	CauseReturned Cause = "returned"       // the driver is back after a refusal
	CauseSilent   Cause = "kubelet-silent" // the kubelet asked, and neither accepts nor comes back
	CauseGone     Cause = "gone"           // withdrawn: the driver is gone, as configured
	CauseMismatch Cause = "mismatch"       // withdrawn: it is another driver, or not to be trusted
	CauseLeaving  Cause = "unconfigured"   // withdrawn: no longer configured, or disabled
)

const (
	// kubeletRetries is how long the kubelet may take to come back after a refusal, or to
	// notify us after its GetInfo. Kubelet v1.36 asks NodeGetInfo for up to 120 s in between,
	// and retries by itself, backing off to 122 s; one that is silent for longer is an older
	// one that keeps the refused plugin and waits for a new socket, or its call was lost.
	kubeletRetries = 150 * time.Second

	// Who removes a whole directory (rm -rf, kubeadm reset) is not to be disturbed. A
	// directory that was deleted is of no use to a running kubelet anyway.
	quietSocket    = 50 * time.Millisecond
	quietDirectory = time.Second
)

type kind int

const (
	rest        kind = iota // nothing to do now
	publish                 // make the socket, or make it again
	withdraw                // take it away
	acknowledge             // note what the kubelet has learned by itself, or need not learn
)

// action is the one thing to do.
type action struct {
	kind  kind
	cause Cause
	why   string
	quiet time.Duration       // for how long it must have been the thing to do
	note  status.Announcement // with acknowledge
	at    time.Time           // with rest: when to look again; zero: no need
}

func (a action) same(b action) bool {
	return a.kind == b.kind && a.cause == b.cause && a.why == b.why
}

// decide looks at everything and says what to do. It changes nothing.
func (r *Registrar) decide(seen status.Socket, now time.Time) action {
	driver := r.known.report.Driver
	switch {
	case r.set.Leaving && seen.Up:
		return action{kind: withdraw, cause: CauseLeaving, why: "no longer configured, or disabled"}
	case r.set.Leaving, r.work.checkErr != nil && seen.Up: // nobody knows what is there now
		return action{}
	case r.stillWanted(seen) != "" && driver == status.Ready:
		return action{kind: publish, cause: r.wanted.cause, why: "it was asked for"}
	case !seen.Up:
		if driver == status.Ready {
			return action{kind: publish, cause: CauseFirst}
		}
		return action{}
	case driver == status.Mismatch:
		return action{kind: withdraw, cause: CauseMismatch, why: r.known.report.Reason}
	case driver != status.Ready:
		return r.decideGone(now)
	case seen.Place == status.Missing && seen.DirMissing:
		return action{kind: publish, cause: CauseRemoved, why: "the plugins_registry was removed", quiet: quietDirectory}
	case seen.Place == status.Missing:
		return action{kind: publish, cause: CauseRemoved, why: "the registration socket was removed", quiet: quietSocket}
	case seen.Place == status.Foreign:
		return action{kind: publish, cause: CauseReplaced, why: "something else is at the path of the registration socket", quiet: quietSocket}
	case r.unverified(seen):
		return action{} // the driver is being asked
	case r.learned(seen):
		note := seen.Announced
		note.Identity = r.known.identity
		return action{kind: acknowledge, note: note}
	}
	if news := difference(seen.Announced, r.announcement()); news != "" {
		return action{kind: publish, cause: CauseChanged, why: news}
	}
	if seen.Announced.LinkTarget != r.set.LinkTarget {
		note := seen.Announced
		note.LinkTarget = r.set.LinkTarget
		return action{kind: acknowledge, note: note}
	}
	return r.decideUnaccepted(seen, now)
}

// decideGone says what becomes of a published socket whose driver is not ready: by default
// nothing, because a withdrawn driver also blocks unmounting.
func (r *Registrar) decideGone(now time.Time) action {
	// What was heard before may be over: at the start nothing was heard at all, and while
	// the daemon was frozen or starved the driver may have come back. It is asked then.
	at := r.goneAt()
	if at.IsZero() || at.After(now) || r.known.startedAt.Before(at) || r.ask.cancel != nil {
		return action{}
	}
	return action{kind: withdraw, cause: CauseGone, why: fmt.Sprintf("the driver is gone for %s", r.set.WithdrawAfter)}
}

// goneAt is when a driver that is absent, and stays so, is withdrawn; zero if it is not.
func (r *Registrar) goneAt() time.Time {
	if !r.set.Withdraw || r.known.report.Driver != status.Absent {
		return time.Time{}
	}
	return r.known.lastPresent.Add(r.set.WithdrawAfter)
}

// decideUnaccepted says what to do while the driver is ready and its socket in place: if the
// kubelet accepted it, nothing.
func (r *Registrar) decideUnaccepted(seen status.Socket, now time.Time) action {
	n := seen.Notification
	last, why := later(n.At, seen.GetInfoAt), ""
	switch {
	case last.IsZero():
		if at := seen.PublishedAt.Add(kubeletAsks); at.After(now) {
			return action{at: at} // to say then that it did not come
		}
		return action{}
	case n.Registered:
		return action{}
	case n.At.IsZero():
		why = "the kubelet asked and has not confirmed within "
	case !r.known.returnedAt.IsZero() && !seen.GetInfoAt.After(r.known.returnedAt): // else it has tried since
		return action{kind: publish, cause: CauseReturned, why: fmt.Sprintf("the driver is back; the kubelet had refused: %q", n.Error)}
	default:
		why = "the kubelet refused and has not come back for "
	}
	if at := last.Add(kubeletRetries); at.After(now) {
		return action{at: at}
	}
	return action{kind: publish, cause: CauseSilent, why: why + kubeletRetries.String()}
}

// stillWanted is the cause of what was asked for and is still to be done: not what the
// kubelet has answered since by itself.
func (r *Registrar) stillWanted(seen status.Socket) Cause {
	if seen.Notification.At.After(r.wanted.at) {
		return ""
	}
	return r.wanted.cause
}

// announcement is what the kubelet shall be told now.
func (r *Registrar) announcement() status.Announcement {
	return status.Announcement{Endpoint: r.set.Endpoint, LinkTarget: r.set.LinkTarget, Versions: r.set.Versions, Identity: r.known.identity}
}
