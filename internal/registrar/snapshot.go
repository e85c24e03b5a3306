package registrar

import (
	"fmt"
	"maps"
	"time"

	"csi-registrar/internal/status"
)

// kubeletAsks is how long a running kubelet takes at most to ask a new socket: its loop
// is 1 s, the rest is generous.
const kubeletAsks = 5 * time.Second

// snapshot makes the Status of this moment.
func (r *Registrar) snapshot(seen status.Socket, now time.Time) status.Driver {
	reg := r.registration(seen)
	s := status.Driver{
		Name: r.set.Name, Socket: r.set.Socket, Endpoint: r.set.Endpoint,
		Driver: r.report.Driver, Registration: reg,
		State:              status.State(r.report.Driver, reg),
		Reason:             r.reason(seen, reg, now),
		RegistrationSocket: seen.Path,
		LastGetInfoAt:      seen.GetInfoAt,
		Accepted:           seen.Accepted,
		Refusals:           seen.Refusals,
		RepublicationsBy:   maps.Clone(r.republish),
	}
	for _, n := range r.republish {
		s.Republications += n
	}
	id := r.identity
	if !r.known && seen.Up {
		id = seen.Announced.Identity // adopted: what an earlier process learned
	}
	s.NodeID, s.Topology, s.MaxVolumes, s.DriverVersion = id.NodeID, id.Topology, id.MaxVolumes, id.Version
	if seen.Up && !seen.Word.At.IsZero() {
		if seen.Word.Registered {
			s.RegisteredAt = seen.Word.At
			// Only the first yes tells how long it took: a kubelet that restarts says it again.
			if !seen.FirstYesAt.IsZero() {
				s.Took = seen.FirstYesAt.Sub(seen.PublishedAt)
			}
		} else {
			s.KubeletError = seen.Word.Error
		}
	}
	s.Since = now
	if s.State == r.status.State {
		s.Since = r.status.Since
	}
	return s
}

// registration derives the second fact.
func (r *Registrar) registration(seen status.Socket) status.RegistrationState {
	switch {
	case isConflict(r.workErr):
		return status.Conflict
	case !seen.Up || seen.Place != status.Ours:
		return status.None
	case seen.Word.At.IsZero(), r.wish(seen) == CauseAsked:
		return status.Published // or about to be, so that `reregister` then `wait` waits
	case seen.Word.Registered:
		return status.Registered
	default:
		return status.Refused
	}
}

// reason says why the driver is not further, in words a person can act on. What stands
// in the way of the registration comes first, then the driver.
func (r *Registrar) reason(seen status.Socket, reg status.RegistrationState, now time.Time) string {
	if r.workErr != nil {
		return r.workErr.Error()
	}
	switch reg {
	case status.Refused:
		return "the kubelet refused: " + seen.Word.Error
	case status.Published:
		if s := unasked(seen, now); s != "" {
			return s
		}
	case status.None:
		if seen.Up && r.report.Driver != status.Ready {
			return "the registration socket is gone, and is made anew when the driver is ready; it is not: " + r.report.Reason
		}
	}
	switch {
	case r.report.Driver == status.Ready:
		return r.left(seen, reg)
	case reg == status.Registered && r.report.Driver == status.Absent && r.set.Withdraw:
		return fmt.Sprintf("the driver is gone (%s); withdrawn when it is gone for %s", r.report.Reason, r.set.WithdrawAfter)
	case reg == status.Registered && r.known:
		return "the driver is not ready, its registration is kept: " + r.report.Reason
	case reg == status.Registered:
		return "" // adopted a moment ago, the driver's first answer is on its way
	}
	return r.report.Reason
}

// left names what changed in the driver and yet is not told to the kubelet.
func (r *Registrar) left(seen status.Socket, reg status.RegistrationState) string {
	if !r.known || (reg != status.Registered && reg != status.Published) {
		return ""
	}
	if moved := movedTopology(seen.Announced.Identity, r.identity); moved != "" {
		return "the driver's topology changed (" + moved + "): the kubelet would refuse it while the Node has the old label, so the registration is left alone. " +
			"If it is meant: remove the label from the Node, then `csi-registrar reregister " + r.set.Name + "`"
	}
	return ""
}

// unasked says what it means that the kubelet has not asked for a new socket.
func unasked(seen status.Socket, now time.Time) string {
	switch {
	case !seen.GetInfoAt.IsZero():
		return "the kubelet has asked, and has not confirmed yet: it now asks the driver itself"
	case now.Sub(seen.PublishedAt) < kubeletAsks:
		return ""
	case seen.FolderAnew:
		return "the plugin registry was made anew, and the kubelet still watches the old one: restart the kubelet"
	}
	return fmt.Sprintf("the kubelet has not asked for the registration socket within %s: it does not run, it has another root directory, "+
		"or it watches a folder that is gone (then restart the kubelet)", kubeletAsks)
}
