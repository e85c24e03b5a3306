package registrar

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
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
	id := r.inputs(seen).announcement().Identity
	if limit := seen.Announced.Identity.MaxVolumes; seen.Up && limit != id.MaxVolumes && !r.inputs(seen).learned() {
		s.KubeletMaxVolumes = &limit
	}
	s.NodeID, s.Topology, s.MaxVolumes, s.DriverVersion = id.NodeID, id.Topology, id.MaxVolumes, id.Version
	if n := seen.Notification; seen.Up && n.Registered {
		s.RegisteredAt = n.At
		// A kubelet that restarts confirms again: only the first confirmation counts.
		if !seen.FirstAcceptedAt.IsZero() {
			s.Took = seen.FirstAcceptedAt.Sub(seen.PublishedAt)
		}
	} else if seen.Up {
		s.KubeletError = n.Error // empty while there is none
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

// Message IDs of the journal, one for each kind of entry. packaging/csi-registrar.catalog
// explains them for `journalctl -x`. Never reuse one.
const (
	messageAbsent      = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c101"
	messageStarting    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c102"
	messageReady       = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c103"
	messageMismatch    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c104"
	messagePublished   = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c105"
	messageRegistered  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c106"
	messageRefused     = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c107"
	messageConflict    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c108"
	messageWithdrawn   = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c109"
	messageRepublished = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10a"
	messageDriverGone  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10b"
	messageDriverBack  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10c"
	messageAttention   = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10d"
	messageHanging     = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10e"
)

// entry is a log entry.
type entry struct {
	level slog.Level
	id    string
	text  string
}

// entered has the entry for each state that a driver enters.
var entered = map[string]entry{
	string(status.Absent):     {slog.LevelInfo, messageAbsent, "waiting for the driver"},
	string(status.Starting):   {slog.LevelInfo, messageStarting, "driver answers, but is not ready"},
	string(status.Ready):      {slog.LevelInfo, messageReady, "driver is ready"},
	string(status.Hanging):    {slog.LevelWarn, messageHanging, "driver does not answer"},
	string(status.Mismatch):   {slog.LevelWarn, messageMismatch, "driver is not what was configured"},
	string(status.Published):  {slog.LevelInfo, messagePublished, "registration socket published"},
	string(status.Registered): {slog.LevelInfo, messageRegistered, "registered with the kubelet"},
	string(status.Refused):    {slog.LevelWarn, messageRefused, "the kubelet refused the registration"},
	string(status.Conflict):   {slog.LevelWarn, messageConflict, "another registrar is in the way"},
}

// logTransition logs a change of the state, or of the driver's state while its registration is
// kept. If only the reason changed, the entry has level debug: a driver that is absent for a
// day costs a few lines. While the driver is ready, a reason is a problem that only a person can
// fix, so it is logged as a warning.
func (r *Registrar) logTransition(prev, next status.Driver, now time.Time) {
	e, first := entered[next.State], !r.introduced
	switch {
	case first && next.State == string(status.Absent) && r.view.AskedAt.IsZero():
		return // wait for the first answer, which has the reason
	case prev.State == "" && next.Registration == status.Registered:
		e.level, e.text = slog.LevelDebug, "still registered with the kubelet, by an earlier process"
	case first || prev.State != next.State:
		if next.State == string(status.Absent) && prev.Registration != "" && prev.Registration != status.None {
			e = entry{slog.LevelWarn, messageWithdrawn, "registration is gone"}
		}
	case next.Driver == status.Ready && prev.DriverSince.IsZero(): // it was there all the time
		e = entry{slog.LevelDebug, messageDriverBack, "driver is ready"}
	case prev.Driver != next.Driver && next.Driver == status.Ready:
		e = entry{slog.LevelInfo, messageDriverBack, "driver is ready again"}
	case prev.Driver != next.Driver && next.Driver == status.Hanging:
		e = entered[string(status.Hanging)]
	case prev.Driver != next.Driver && !(prev.Driver == status.Absent && r.view.Known.Name == ""),
		prev.DriverSince.IsZero() && !next.DriverSince.IsZero():
		e = entry{slog.LevelInfo, messageDriverGone, "driver is not ready"}
	case prev.Reason == next.Reason:
		return
	case next.Driver == status.Ready && next.Reason != "" && next.WithdrawalError == "" &&
		(next.Registration != status.Published || next.LastGetInfoAt.IsZero()):
		e = entry{slog.LevelDebug, messageAttention, "needs attention"}
		if r.complaints.Allow(now) {
			e.level = slog.LevelWarn
		}
	default:
		e.level, e.text = slog.LevelDebug, "reason changed"
	}
	r.introduced = true
	attrs := []any{"MESSAGE_ID", e.id, "state", next.State, "driver_state", string(next.Driver), "registration", string(next.Registration)}
	if prev.State != "" && prev.State != next.State {
		attrs = append(attrs, "from", prev.State, "after", now.Sub(prev.Since).Round(time.Millisecond))
	}
	if next.Reason != "" {
		attrs = append(attrs, "reason", next.Reason)
	}
	r.log.Log(context.Background(), e.level, e.text, attrs...)
}
