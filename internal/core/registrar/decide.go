package registrar

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// Cause is why a registration socket is published, republished or withdrawn. It is
// part of the log.
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
	nothing  actionKind = iota // nothing to do now
	publish                    // create the socket, or recreate it
	withdraw                   // remove it
)

// action is the one thing to do next.
type action struct {
	kind   actionKind
	cause  Cause
	reason string
	quiet  time.Duration // how long the action must have been pending
	next   time.Time     // with nothing: when to decide again; zero: at the next event
}

// inputs is everything that an action depends on besides the time.
type inputs struct {
	table       config.Driver
	driver      status.View
	socket      status.Socket
	checkFailed bool // the last Check failed, so the file at the path is unknown
	request     pendingRequest
	atStart     string // the endpoint of the table at the start of the process
}

// decide returns the next action. It is a pure function.
func decide(in inputs, now time.Time) action {
	driver := in.driver.Driver
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
		return action{kind: withdraw, cause: CauseMismatch, reason: in.driver.Reason}
	case driver != status.Ready:
		if gone := decideGone(in, now); gone.kind != nothing || !in.misled() {
			return gone
		}
		return action{kind: publish, cause: CauseChanged, reason: fmt.Sprintf("an earlier process announced the endpoint %q, it is %q", in.socket.Announced.Endpoint, in.table.Endpoint)}
	case in.socket.Place == status.Missing && in.socket.DirMissing:
		return action{kind: publish, cause: CauseRemoved, reason: "the plugins_registry was removed", quiet: quietDirectory}
	case in.socket.Place == status.Missing:
		return action{kind: publish, cause: CauseRemoved, reason: "the registration socket was removed", quiet: quietSocket}
	case in.socket.Place == status.Foreign:
		return action{kind: publish, cause: CauseReplaced, reason: "something else is at the path of the registration socket", quiet: quietSocket}
	}
	if changed := difference(in.socket.Announced, in.announcement(), in.table.WhenLimitChanges, in.learned()); changed != "" {
		return action{kind: publish, cause: CauseChanged, reason: changed}
	}
	return decideUnaccepted(in, now)
}

// decideGone returns what to do with a published socket whose driver is not ready: by default
// nothing, because volumes of a withdrawn driver cannot be unmounted.
func decideGone(in inputs, now time.Time) action {
	if in.table.WhenGone != config.Withdraw || in.driver.Driver != status.Absent {
		return action{}
	}
	if at := in.driver.LastPresent.Add(in.table.WithdrawAfter); at.After(now) {
		return action{next: at}
	}
	return action{kind: withdraw, cause: CauseGone, reason: fmt.Sprintf("the driver is gone for %s", in.table.WithdrawAfter)}
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
	case !in.driver.ReturnedAt.IsZero() && !asked.After(in.driver.ReturnedAt):
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
// itself.
func (in inputs) openRequest() Cause {
	if in.socket.Notification.At.After(in.request.at) {
		return ""
	}
	return in.request.cause
}

// announcement returns what the kubelet should be told now.
func (in inputs) announcement() status.Announcement {
	a := status.Announcement{Endpoint: in.table.Endpoint, Versions: in.table.SupportedVersions, Identity: in.driver.Known}
	if a.Identity.Name == "" && in.socket.Up { // adopted, and the driver has not answered yet
		a.Identity = in.socket.Announced.Identity
	}
	return a
}

// misled reports whether the kubelet has another endpoint than the configured one from an earlier
// process, which may have been compromised. That is not left until the driver is ready. A table
// that has changed since the start, perhaps by a typing error, does not count.
func (in inputs) misled() bool {
	told := in.socket.Announced.Endpoint
	return in.socket.Adopted && in.socket.Place == status.Ours && told != in.table.Endpoint && told != in.atStart
}

// learned reports whether the kubelet has learned the current identity of a driver that is ready by
// itself: it accepted the registration again, as it does after its restart, and asked the driver in
// between, which had this identity already.
func (in inputs) learned() bool {
	n, asked := in.socket.Notification, in.socket.GetInfoAt
	return n.Registered && in.driver.KnownSince.Before(asked) && !asked.After(n.At)
}

// difference describes what the kubelet must be told with a new registration; empty if nothing. A
// changed endpoint or version always counts. The values that the kubelet asks the driver for count
// unless a topology value changed: the kubelet would refuse it (v1.36) because the Node has the old
// label, and a working registration would be lost. It would not if it has learned the new value by
// itself. With config.Leave a changed limit alone does not
// count: the kubelet asks the driver for it periodically. The API server would refuse such an
// update with another node ID or topology key, so these still count (v1.37).
func difference(old, now status.Announcement, limit config.WhenLimitChanges, learned bool) string {
	var changes []string
	compare := func(what, o, n string) {
		if o != n {
			changes = append(changes, fmt.Sprintf("%s was %q, is %q", what, o, n))
		}
	}
	compare("endpoint", old.Endpoint, now.Endpoint)
	compare("supported versions", strings.Join(old.Versions, ","), strings.Join(now.Versions, ","))
	moved, added := topologyChanges(old.Identity.Topology, now.Identity.Topology)
	if len(moved) > 0 && learned {
		changes = append(changes, "the kubelet has accepted "+strings.Join(moved, ", "))
	} else if len(changes) == 0 && len(moved) > 0 {
		return ""
	}
	compare("node id", old.Identity.NodeID, now.Identity.NodeID)
	if o, n := old.Identity.MaxVolumes, now.Identity.MaxVolumes; o != n && limit != config.Leave {
		changes = append(changes, fmt.Sprintf("volume limit was %d, is %d", o, n))
	}
	if len(added) > 0 {
		changes = append(changes, "topology keys added: "+strings.Join(added, ", "))
	}
	return strings.Join(changes, "; ")
}

// topologyChanges returns the topology keys whose value differs from the announced one, and the
// keys that were not announced.
func topologyChanges(old, now map[string]string) (moved, added []string) {
	if maps.Equal(old, now) { // nearly always
		return nil, nil
	}
	for _, k := range slices.Sorted(maps.Keys(now)) {
		if was, ok := old[k]; !ok {
			added = append(added, k)
		} else if was != now[k] {
			moved = append(moved, fmt.Sprintf("%s=%q was %q", k, now[k], was))
		}
	}
	return moved, added
}

// refusedChange describes a changed topology value, and with it a changed node ID, that the kubelet
// would refuse as long as the Node has the old label; empty: there is none.
func refusedChange(old, now status.Identity) string {
	moved, _ := topologyChanges(old.Topology, now.Topology)
	if len(moved) == 0 {
		return ""
	}
	text := "the driver's topology changed (" + strings.Join(moved, ", ") + ")"
	if old.NodeID != now.NodeID {
		text += fmt.Sprintf(" and its node id (%q was %q)", now.NodeID, old.NodeID)
	}
	return text + ": the kubelet would refuse it while the Node has the old label"
}
