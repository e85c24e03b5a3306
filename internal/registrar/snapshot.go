package registrar

import (
	"cmp"
	"fmt"
	"maps"
	"strings"
	"time"

	"csi-registrar/internal/status"
)

// kubeletAsks is how long a running kubelet takes at most to ask a new socket: its loop
// is 1 s, the rest is generous.
const kubeletAsks = 5 * time.Second

// snapshot is the status of this moment.
func (r *Registrar) snapshot(seen status.Socket, now time.Time) status.Driver {
	reg := r.registration(seen)
	s := status.Driver{
		Name: r.set.Name, Socket: r.set.Socket, Endpoint: r.set.Endpoint, LinkTarget: r.set.LinkTarget,
		Driver: r.known.report.Driver, Registration: reg,
		State:              status.State(r.known.report.Driver, reg),
		Reason:             r.reason(seen, reg, now),
		RegistrationSocket: seen.Path,
		LastGetInfoAt:      seen.GetInfoAt,
		Accepted:           seen.Accepted,
		Refusals:           seen.Refusals,
		RepublicationsBy:   maps.Clone(r.counted),
		NotKept:            seen.NotKept,
		Traced:             seen.Traced,
		DampedUntil:        r.dampedUntil(now),
	}
	for _, n := range r.counted {
		s.Republications += n
	}
	id := r.known.identity
	if id.Name == "" && seen.Up {
		id = seen.Announced.Identity // adopted: what an earlier process learned
	}
	s.NodeID, s.Topology, s.MaxVolumes, s.DriverVersion = id.NodeID, id.Topology, id.MaxVolumes, id.Version
	if seen.Up && !seen.Notification.At.IsZero() {
		if seen.Notification.Registered {
			s.RegisteredAt = seen.Notification.At
			// Only the first yes tells how long it took: a kubelet that restarts says it again.
			if !seen.FirstAcceptedAt.IsZero() {
				s.Took = seen.FirstAcceptedAt.Sub(seen.PublishedAt)
			}
		} else {
			s.KubeletError = seen.Notification.Error
		}
	}
	s.Since = now
	if s.State == r.status.State {
		s.Since = r.status.Since
	}
	return s
}

// registration derives the state of the registration.
func (r *Registrar) registration(seen status.Socket) status.RegistrationState {
	switch {
	case isConflict(r.work.err):
		return status.Conflict
	case !seen.Up || seen.Place != status.Ours:
		return status.None
	case seen.Notification.At.IsZero(), r.stillWanted(seen) == CauseAsked:
		return status.Published // or about to be, so that `reregister` then `wait` waits
	case seen.Notification.Registered:
		return status.Registered
	default:
		return status.Refused
	}
}

// reason says what is blocking the driver, in words a person can act on: first what is in the
// way of the registration, then the driver.
func (r *Registrar) reason(seen status.Socket, reg status.RegistrationState, now time.Time) string {
	driver, why := r.known.report.Driver, r.known.report.Reason
	switch until := r.dampedUntil(now); {
	case r.work.err != nil:
		return r.work.err.Error()
	case r.work.checkErr != nil:
		return r.work.checkErr.Error()
	case !until.IsZero():
		return fmt.Sprintf("the registration socket changed %d times within an hour (%s): it is changed again when this has stayed so for a while, at %s",
			r.work.churn.count(now), cmp.Or(r.work.pending.why, "the driver is ready"), until.UTC().Format(time.TimeOnly+" MST"))
	case reg == status.Refused:
		return fmt.Sprintf("the kubelet refused: %q", seen.Notification.Error) // it can quote the driver
	case driver == status.Ready:
		return r.attention(seen, reg, now)
	case reg == status.None && seen.Up:
		return "the registration socket is gone, and is restored when the driver is ready; it is not: " + why
	case reg != status.Registered:
		return why
	case driver == status.Absent && r.set.Withdraw:
		return fmt.Sprintf("the driver is gone (%s); withdrawn when it is gone for %s", why, r.set.WithdrawAfter)
	case driver == status.Absent && r.known.startedAt.IsZero() && r.known.identity.Name == "":
		return "" // adopted a moment ago, the driver's first answer is on its way
	}
	return "the driver is not ready, its registration is kept: " + why
}

// attention names what a person should know of a driver that is ready: what the kubelet has not
// done, what changed in the driver and yet is not told to the kubelet, and who else serves it.
func (r *Registrar) attention(seen status.Socket, reg status.RegistrationState, now time.Time) string {
	if reg != status.Registered && reg != status.Published {
		return ""
	}
	late := reg == status.Published && now.Sub(seen.PublishedAt) >= kubeletAsks
	moved, _ := topologyNews(seen.Announced.Identity.Topology, r.known.identity.Topology)
	switch {
	case reg == status.Published && !seen.GetInfoAt.IsZero():
		return "the kubelet has asked, and has not confirmed yet: it now asks the driver itself"
	case late && seen.DirRecreated:
		return "the plugins_registry was recreated; the kubelet still watches the deleted directory: restart the kubelet"
	case late:
		return fmt.Sprintf("the kubelet has not asked for the registration socket within %s: it does not run, has another root directory, "+
			"or it watches a directory that was deleted (then restart the kubelet)", kubeletAsks)
	case len(moved) > 0:
		return "the driver's topology changed (" + strings.Join(moved, ", ") + "): the kubelet would refuse it while the Node has the old label, so the registration is left alone. " +
			"If it is meant: remove the label from the Node, then `csi-registrar reregister " + r.name + "`"
	}
	return cmp.Or(seen.LinkError, seen.AlsoServed)
}
