package registrar

import (
	"fmt"
	"strings"
	"time"

	"csi-registrar/internal/status"
)

// Cause is why a registration socket is made, made anew or taken away; it is a label of
// the metric republications_total and stands in the log.
type Cause string

// The causes.
const (
	CauseFirst    Cause = "first"          // nothing was published yet
	CauseRemoved  Cause = "removed"        // somebody removed the socket, or its folder
	CauseReplaced Cause = "replaced"       // something else is at its path
	CauseChanged  Cause = "changed"        // the kubelet must learn something new
	CauseAsked    Cause = "asked"          // reregister
	CauseReturned Cause = "returned"       // the driver is back after a refusal
	CauseSilent   Cause = "kubelet-silent" // an older kubelet does not come back after a refusal
	CauseGone     Cause = "gone"           // withdrawn: the driver is gone, as configured
	CauseMismatch Cause = "mismatch"       // withdrawn: it is another driver, or not to be trusted
)

// kubeletRetries is how long the kubelet may take to come back after a refusal. Kubelet
// v1.36 retries by itself, backing off to 122 s; one that is silent for longer is an older one
// that keeps the refused plugin and waits for a new socket.
const kubeletRetries = 150 * time.Second

type kind int

const (
	rest     kind = iota // nothing to do now
	publish              // make the socket, or make it anew
	withdraw             // take it away
)

// action is the one thing to do; at is when it may be done, or, with rest, when to look
// again (zero: no need).
type action struct {
	kind  kind
	cause Cause
	why   string
	at    time.Time
}

// decide looks at everything and says what to do. It changes nothing but the buckets'
// bookkeeping of time.
func (r *Registrar) decide(seen status.Socket, now time.Time) action {
	switch {
	case !seen.Up:
		if r.report.Driver == status.Ready {
			return action{kind: publish, cause: CauseFirst}
		}
		return action{}
	case r.report.Driver == status.Mismatch:
		return action{kind: withdraw, cause: CauseMismatch, why: r.report.Reason}
	case r.report.Driver != status.Ready:
		return r.decideGone(now)
	case seen.Place == status.Missing:
		return action{kind: publish, cause: CauseRemoved, why: "the registration socket was removed", at: r.restores.next(now)}
	case seen.Place == status.Foreign:
		return action{kind: publish, cause: CauseReplaced, why: "something else is at the path of the registration socket", at: r.restores.next(now)}
	case r.wish(seen) != "":
		return action{kind: publish, cause: r.wanted, why: "it was asked for"}
	}
	if news := difference(seen.Announced, r.announcement()); news != "" {
		return action{kind: publish, cause: CauseChanged, why: news, at: r.changes.next(now)}
	}
	return r.decideRefused(seen, now)
}

// decideGone says what becomes of a published socket whose driver is not ready: by default
// nothing, because a withdrawn driver also blocks unmounting.
func (r *Registrar) decideGone(now time.Time) action {
	// What was heard before may be over: at the start nothing was heard at all, and while
	// the daemon was frozen or starved the driver may have come back. It is asked then.
	at := r.goneAt()
	if at.IsZero() || at.After(now) || r.told.Before(at) || r.asking != nil {
		return action{}
	}
	return action{kind: withdraw, cause: CauseGone, why: fmt.Sprintf("the driver is gone for %s", r.set.WithdrawAfter)}
}

// goneAt is when a driver that is absent, and stays so, is withdrawn; zero if it is not.
func (r *Registrar) goneAt() time.Time {
	if !r.set.Withdraw || r.report.Driver != status.Absent {
		return time.Time{}
	}
	return r.lastUp.Add(r.set.WithdrawAfter)
}

// decideRefused says what to do while the driver is ready and its socket in place, as the
// kubelet sees it: only after a refusal there can be something.
func (r *Registrar) decideRefused(seen status.Socket, now time.Time) action {
	w := seen.Word
	switch {
	case w.At.IsZero() && seen.GetInfoAt.IsZero():
		if at := seen.PublishedAt.Add(kubeletAsks); at.After(now) {
			return action{at: at} // to say then that it did not come
		}
		return action{}
	case w.At.IsZero() || w.Registered:
		return action{}
	case !r.returned.IsZero() && !seen.GetInfoAt.After(r.returned): // else it has tried since
		return action{kind: publish, cause: CauseReturned, why: "the driver is back; the kubelet had refused: " + w.Error, at: r.changes.next(now)}
	}
	last := later(w.At, seen.GetInfoAt)
	if at := last.Add(kubeletRetries); at.After(now) {
		return action{at: at}
	}
	return action{kind: publish, cause: CauseSilent, why: fmt.Sprintf("the kubelet refused and has not come back for %s", kubeletRetries), at: r.changes.next(now)}
}

// wish is what a command asked for and is still to be done: not what the kubelet has
// answered since by itself.
func (r *Registrar) wish(seen status.Socket) Cause {
	if seen.Word.At.After(r.wantedAt) {
		return ""
	}
	return r.wanted
}

// announcement is what the kubelet shall be told now.
func (r *Registrar) announcement() status.Announcement {
	return status.Announcement{Endpoint: r.set.Endpoint, Versions: r.set.Versions, Identity: r.identity}
}

// difference tells what the kubelet must and can learn, as old and new; empty if nothing.
// What it is told itself (endpoint, versions) always counts. What it would ask the driver
// counts unless a topology value changed: then it would refuse (kubelet v1.36), because
// the Node has the old label, and a working registration would be lost.
func difference(old, now status.Announcement) string {
	var news []string
	say := func(what, o, n string) {
		if o != n {
			news = append(news, fmt.Sprintf("%s was %q, is %q", what, o, n))
		}
	}
	say("endpoint", old.Endpoint, now.Endpoint)
	say("supported versions", strings.Join(old.Versions, ","), strings.Join(now.Versions, ","))
	if len(news) == 0 && movedTopology(old.Identity, now.Identity) != "" {
		return ""
	}
	say("node id", old.Identity.NodeID, now.Identity.NodeID)
	if o, n := old.Identity.MaxVolumes, now.Identity.MaxVolumes; o != n {
		news = append(news, fmt.Sprintf("volume limit was %d, is %d", o, n))
	}
	if added := addedTopology(old.Identity, now.Identity); added != "" {
		news = append(news, "topology keys added: "+added)
	}
	return strings.Join(news, "; ")
}
