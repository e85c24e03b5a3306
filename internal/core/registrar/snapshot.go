package registrar

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// kubeletAsks is how long a running kubelet may take to call GetInfo on a new socket. Its loop
// is 1 s.
const kubeletAsks = 5 * time.Second

// snapshot returns the current status.
func (r *Registrar) snapshot(seen status.Socket, now time.Time) status.Driver {
	reg := r.registration(seen)
	s := status.Driver{
		Name: r.name, Socket: safetext.Claim(r.table.Socket), Endpoint: safetext.Claim(r.table.Endpoint),
		Driver: r.view.Driver, Registration: reg,
		State:              status.State(r.view.Driver, reg),
		RegistrationSocket: safetext.Claim(seen.Path),
		LastGetInfoAt:      seen.GetInfoAt,
		Accepted:           seen.Accepted,
		Refusals:           seen.Refusals,
		Republications:     r.counted,
		NotKept:            seen.NotKept,
		Server:             r.view.Server,
		Restarts:           r.view.Restarts,
		RestartsTotal:      r.view.RestartsTotal,
		DampedUntil:        r.task.dampedUntil(now),
	}
	if reg == status.Registered || reg == status.Published {
		s.RefusedChange = refusedChange(seen.Announced.Identity, r.view.Known)
	}
	if reg == status.Conflict {
		s.ServedBy, s.Yields = seen.ServedBy, seen.Yields
	}
	s.Reason = r.reason(seen, &s, now)
	if t := &r.task; t.pending.kind == withdraw && t.err != nil {
		s.WithdrawalError, s.WithdrawalFailedAt = t.err.Error(), t.failedAt
	}
	id := r.view.Known
	if id.Name == "" && seen.Up {
		id = seen.Announced.Identity // adopted from an earlier process
	}
	if limit := seen.Announced.Identity.MaxVolumes; seen.Up && limit != id.MaxVolumes && !r.inputs(seen).learned() {
		s.KubeletMaxVolumes = &limit
	}
	s.NodeID, s.Topology, s.MaxVolumes, s.DriverVersion = id.NodeID, id.Topology, id.MaxVolumes, id.Version
	if seen.Up && !seen.Notification.At.IsZero() {
		if seen.Notification.Registered {
			s.RegisteredAt = seen.Notification.At
			// A kubelet that restarts confirms again: only the first confirmation counts.
			if !seen.FirstAcceptedAt.IsZero() {
				s.Took = seen.FirstAcceptedAt.Sub(seen.PublishedAt)
			}
		} else {
			s.KubeletError = seen.Notification.Error
		}
	}
	s.Since = now
	switch {
	case s.State == r.status.State:
		s.Since = r.status.Since
	case s.State == string(status.Registered) && s.RegisteredAt.Before(r.begunAt): // adopted
		s.Since = s.RegisteredAt
	}
	switch s.DriverSince = now; {
	case s.Driver == status.Absent && r.view.AskedAt.IsZero():
		s.DriverSince = time.Time{}
	case s.Driver == r.status.Driver && !r.status.DriverSince.IsZero():
		s.DriverSince = r.status.DriverSince
	}
	return s
}

// registration returns the state of the registration.
func (r *Registrar) registration(seen status.Socket) status.RegistrationState {
	switch {
	case isConflict(r.task.err):
		return status.Conflict
	case !seen.Up || seen.Place != status.Ours:
		return status.None
	case seen.Notification.At.IsZero(), r.inputs(seen).openRequest() == CauseAsked:
		return status.Published // or about to be: `wait` after `reregister` waits
	case seen.Notification.Registered:
		return status.Registered
	default:
		return status.Refused
	}
}

// reason describes, for a person who can act on it, why the driver is not registered, or else the
// problem of the driver.
func (r *Registrar) reason(seen status.Socket, s *status.Driver, now time.Time) string {
	driver, reg, why := s.Driver, s.Registration, r.view.Reason
	switch {
	case r.task.err != nil:
		return r.task.err.Error()
	case r.task.checkErr != nil:
		return r.task.checkErr.Error()
	case !s.DampedUntil.IsZero():
		return r.damped(s.DampedUntil, now)
	case reg == status.Refused:
		// it can quote the driver
		return strings.TrimSuffix(fmt.Sprintf("the kubelet refused: %q; %s", seen.Notification.Error, seen.AlsoServed), "; ")
	case driver == status.Ready:
		return r.attention(seen, s, now)
	case reg == status.None && seen.Up:
		return "the registration socket is gone, and is restored when the driver is ready; it is not: " + why
	case reg != status.Registered:
		return why
	case driver == status.Mismatch || !r.table.Enabled:
		return "the registration is withdrawn: " + cmp.Or(why, "the driver is disabled, or no longer configured here")
	case driver == status.Absent && r.table.WhenGone == config.Withdraw:
		return fmt.Sprintf("the driver is gone (%s); withdrawn when it is gone for %s", why, r.table.WithdrawAfter)
	case driver == status.Absent && r.view.AskedAt.IsZero() && r.view.Known.Name == "":
		return "" // adopted a moment ago, the driver's first answer is on its way
	}
	return "the driver is not ready, its registration is kept: " + why
}

// damped describes why the pending publication waits.
func (r *Registrar) damped(until, now time.Time) string {
	kind, why := r.task.publicationKind(), ""
	switch n := r.task.made.count(kind, now); kind {
	case alter:
		why = fmt.Sprintf("the registration changed %d times within an hour (%s): it is changed again when this has stayed so for a while", n, r.task.pending.reason)
	case restore:
		why = fmt.Sprintf("the registration socket was removed or replaced, or refused by the kubelet, %d times within an hour: it is restored", n)
	case renew:
		why = fmt.Sprintf("the driver was registered %d times within an hour and withdrawn again: it is registered when it has been ready for %s", n, renewWait)
	case retake:
		why = fmt.Sprintf("another registrar took the path of the registration socket again: it is published when the path has been free for %s", retakeWait)
	}
	return why + ", at " + until.UTC().Format(time.TimeOnly+" MST")
}

// attention describes the problem, if any, of a driver that is ready: the kubelet did not ask, the
// driver changed and the kubelet cannot be told, or its endpoint link is wrong.
func (r *Registrar) attention(seen status.Socket, s *status.Driver, now time.Time) string {
	published := s.Registration == status.Published
	late := published && now.Sub(seen.PublishedAt) >= kubeletAsks
	switch {
	case published && !seen.GetInfoAt.IsZero():
		return "the kubelet has asked, and has not confirmed yet: it now asks the driver itself"
	case late && seen.DirRecreated:
		return "the plugins_registry is another directory than the one that the kubelet watches: it was recreated, or a mount covers it; restart the kubelet"
	case late:
		return fmt.Sprintf("the kubelet has not asked for the registration socket within %s: it does not run, has another root directory, "+
			"or it watches a directory that was deleted (then restart the kubelet)", kubeletAsks)
	case s.RefusedChange != "":
		return s.RefusedChange + ", so the registration is left alone. If it is meant: remove the label from the Node, then `csi-registrar reregister --force " + r.name + "`"
	}
	return ""
}
