package registrar

import (
	"fmt"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// Cause is why a registration socket is published, republished or withdrawn. It is a label of
// the metric republications_total and part of the log.
type Cause string

// The causes.
const (
	CauseFirst    Cause = "first"          // nothing was published yet
	CauseRemoved  Cause = "removed"        // the socket, or its directory, was removed
	CauseReplaced Cause = "replaced"       // something else is at its path
	CauseChanged  Cause = "changed"        // the kubelet must learn something new
	CauseAsked    Cause = "asked"          // the command reregister
	CauseReturned Cause = "returned"       // the driver is back after a refusal
	CauseSilent   Cause = "kubelet-silent" // the kubelet asked, and neither accepts nor retries
	CauseGone     Cause = "gone"           // withdrawn: the driver is gone, as configured
	CauseMismatch Cause = "mismatch"       // withdrawn: another driver, or an untrusted one
	CauseLeaving  Cause = "unconfigured"   // withdrawn: no longer configured, or disabled
)

const (
	// kubeletRetries is how long the kubelet may take to come back after a refusal, or to
	// notify us after its GetInfo. Kubelet v1.36 waits up to 120 s for NodeGetInfo in between,
	// and retries with a backoff of up to 122 s. If it is silent for longer, it is an older
	// one, which keeps the refused plugin and waits for a new socket, or its call was lost.
	kubeletRetries = 150 * time.Second

	// quietSocket and quietDirectory are for how long the socket, or its directory, must have
	// been missing before it is restored: do not interfere with a recursive delete (rm -rf,
	// kubeadm reset). A running kubelet does not see a recreated directory anyway.
	quietSocket    = 50 * time.Millisecond
	quietDirectory = time.Second
)

type actionKind int

const (
	nothing     actionKind = iota // nothing to do now
	publish                       // create the socket, or recreate it
	withdraw                      // remove it
	acknowledge                   // record a change that needs no registration
)

// action is the one thing to do next.
type action struct {
	kind   actionKind
	cause  Cause
	reason string
	quiet  time.Duration       // how long the action must have been pending
	note   status.Announcement // with acknowledge
	next   time.Time           // with nothing: when to decide again; zero: at the next event
}

func (a action) same(b action) bool {
	return a.kind == b.kind && a.cause == b.cause && a.reason == b.reason
}

// inputs is everything that an action depends on besides the time.
type inputs struct {
	kubelet     config.Kubelet
	table       config.Driver
	driver      driverView
	asking      bool // an Ask is running
	socket      status.Socket
	checkFailed bool // the last Check failed, so the file at the path is unknown
	request     pendingRequest
}

// decide returns the next action. It is a pure function.
func decide(in inputs, now time.Time) action {
	driver := in.driver.report.Driver
	switch {
	case !in.table.Enabled && in.socket.Up:
		return action{kind: withdraw, cause: CauseLeaving, reason: "disabled, no longer configured, or root_dir was changed"}
	case !in.table.Enabled, in.checkFailed && in.socket.Up:
		return action{}
	case in.openRequest() != "" && driver == status.Ready:
		return action{kind: publish, cause: in.request.cause, reason: "requested"}
	case !in.socket.Up:
		if driver == status.Ready {
			return action{kind: publish, cause: CauseFirst}
		}
		return action{}
	case driver == status.Mismatch:
		return action{kind: withdraw, cause: CauseMismatch, reason: in.driver.report.Reason}
	case driver != status.Ready:
		return decideGone(in, now)
	case in.socket.Place == status.Missing && in.socket.DirMissing:
		return action{kind: publish, cause: CauseRemoved, reason: "the plugins_registry was removed", quiet: quietDirectory}
	case in.socket.Place == status.Missing:
		return action{kind: publish, cause: CauseRemoved, reason: "the registration socket was removed", quiet: quietSocket}
	case in.socket.Place == status.Foreign:
		return action{kind: publish, cause: CauseReplaced, reason: "something else is at the path of the registration socket", quiet: quietSocket}
	case in.unverified(now):
		return action{} // the driver is being asked
	case in.learned():
		note := in.socket.Announced
		note.Identity = in.driver.identity
		return action{kind: acknowledge, note: note}
	}
	current := in.announcement()
	if changed := difference(in.socket.Announced, current, in.table.WhenLimitChanges); changed != "" {
		return action{kind: publish, cause: CauseChanged, reason: changed}
	}
	if in.socket.Announced.LinkTarget != current.LinkTarget {
		note := in.socket.Announced
		note.LinkTarget = current.LinkTarget
		return action{kind: acknowledge, note: note}
	}
	return decideUnaccepted(in, now)
}

// decideGone returns what to do with a published socket whose driver is not ready: by default
// nothing, because volumes of a withdrawn driver cannot be unmounted.
func decideGone(in inputs, now time.Time) action {
	// The last report may be outdated: at the start there is none, and while the daemon was
	// frozen or starved the driver may have come back. It is asked again first.
	at := in.goneAt()
	if at.IsZero() || at.After(now) || in.driver.askedAt.Before(at) || in.asking {
		return action{}
	}
	return action{kind: withdraw, cause: CauseGone, reason: fmt.Sprintf("the driver is gone for %s", in.table.WithdrawAfter)}
}

// goneAt returns when a driver that is absent, and stays so, is withdrawn; zero if never.
func (in inputs) goneAt() time.Time {
	if in.table.WhenGone != config.Withdraw || in.driver.report.Driver != status.Absent {
		return time.Time{}
	}
	return in.driver.lastPresent.Add(in.table.WithdrawAfter)
}

// decideUnaccepted returns what to do while the driver is ready and its socket in place:
// nothing if the kubelet accepted it.
func decideUnaccepted(in inputs, now time.Time) action {
	n, asked := in.socket.Notification, in.socket.GetInfoAt
	last, reason := later(n.At, asked), ""
	switch {
	case last.IsZero():
		if at := in.socket.PublishedAt.Add(kubeletAsks); at.After(now) {
			return action{next: at} // then the status reports that the kubelet has not asked
		}
		return action{}
	case n.Registered:
		return action{}
	case n.At.IsZero():
		reason = "the kubelet asked and has not confirmed within "
	// The kubelet has not tried since the driver is back.
	case !in.driver.returnedAt.IsZero() && !asked.After(in.driver.returnedAt):
		return action{kind: publish, cause: CauseReturned, reason: fmt.Sprintf("the driver is back; the kubelet had refused: %q", n.Error)}
	default:
		reason = "the kubelet refused and has not come back for "
	}
	if at := last.Add(kubeletRetries); at.After(now) {
		return action{next: at}
	}
	return action{kind: publish, cause: CauseSilent, reason: reason + kubeletRetries.String()}
}

// openRequest returns the cause of the pending request, unless the kubelet has answered since by
// itself, or the socket was published since: late, by a call that had been abandoned.
func (in inputs) openRequest() Cause {
	if in.socket.Notification.At.After(in.request.at) || in.socket.PublishedAt.After(in.request.at) {
		return ""
	}
	return in.request.cause
}

// announcement returns what the kubelet should be told now.
func (in inputs) announcement() status.Announcement {
	endpoint, target := in.kubelet.Announced(in.table)
	return status.Announcement{Endpoint: endpoint, LinkTarget: target, Versions: in.table.SupportedVersions, Identity: in.driver.identity}
}

// unverified reports whether the kubelet accepted the registration again, as it does after its
// restart, and the driver has not been asked since. The kubelet asks the driver itself: what it
// learned is certain once the driver gives the same answer after that as before. No Ask comes after
// an answer in the future, which an earlier process recorded before the wall clock was set back.
func (in inputs) unverified(now time.Time) bool {
	n := in.socket.Notification
	return n.Registered && n.At.After(in.driver.askedAt) && !n.At.After(now) && !in.socket.Announced.Identity.Equal(in.driver.identity)
}

// learned reports whether the kubelet has learned the current identity of a driver that is ready by
// itself.
func (in inputs) learned() bool {
	d, n, asked := &in.driver, in.socket.Notification, in.socket.GetInfoAt
	return n.Registered && !in.socket.Announced.Identity.Equal(d.identity) &&
		d.identitySince.Before(asked) && !asked.After(n.At) && !d.askedAt.Before(n.At)
}
