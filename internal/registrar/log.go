package registrar

import (
	"context"
	"log/slog"
	"time"

	"csi-registrar/internal/status"
)

// Message IDs of the journal, one for each kind of entry; packaging/csi-registrar.catalog
// explains them for `journalctl -x`. They are forever: never reuse one.
const (
	MessageAbsent      = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c101"
	MessageStarting    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c102"
	MessageReady       = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c103"
	MessageMismatch    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c104"
	MessagePublished   = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c105"
	MessageRegistered  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c106"
	MessageRefused     = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c107"
	MessageConflict    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c108"
	MessageWithdrawn   = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c109"
	MessageRepublished = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10a"
	MessageDriverGone  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10b"
	MessageDriverBack  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10c"
	MessageAttention   = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10d"
)

// logged is what the log has of a driver already.
type logged struct {
	introduced bool // its first state
	complaints pace // of lines about what only a person can fix
}

// entry is a line of the log.
type entry struct {
	level slog.Level
	id    string
	text  string
}

// entered are the lines for a state that is entered.
var entered = map[string]entry{
	string(status.Absent):     {slog.LevelInfo, MessageAbsent, "waiting for the driver"},
	string(status.Starting):   {slog.LevelInfo, MessageStarting, "driver answers, but is not ready"},
	string(status.Ready):      {slog.LevelInfo, MessageReady, "driver is ready"},
	string(status.Mismatch):   {slog.LevelWarn, MessageMismatch, "driver is not what was configured"},
	string(status.Published):  {slog.LevelInfo, MessagePublished, "registration socket published"},
	string(status.Registered): {slog.LevelInfo, MessageRegistered, "registered with the kubelet"},
	string(status.Refused):    {slog.LevelWarn, MessageRefused, "the kubelet refused the registration"},
	string(status.Conflict):   {slog.LevelWarn, MessageConflict, "another registrar is in the way"},
}

// logTransition writes one entry for a change of state, and one for a driver that goes or
// comes back under a registration that stays. A reason that alone changed is for debugging:
// a driver that is absent for a day costs a few lines. Only while the driver is ready is
// a reason something that nobody but a person can fix, so it is said.
func (r *Registrar) logTransition(prev, next status.Driver, now time.Time) {
	e, first := entered[next.State], !r.logged.introduced
	switch {
	case first && next.State == string(status.Absent) && r.known.startedAt.IsZero():
		return // nothing is known before the first answer
	case prev.State == "" && next.Registration == status.Registered:
		e.text = "still registered with the kubelet, by an earlier process"
	case first || prev.State != next.State:
		if next.State == string(status.Absent) && prev.Registration != "" && prev.Registration != status.None {
			e = entry{slog.LevelWarn, MessageWithdrawn, "registration is gone"}
		}
	case prev.Driver != next.Driver && next.Driver == status.Ready:
		e = entry{slog.LevelInfo, MessageDriverBack, "driver is ready again"}
	case prev.Driver != next.Driver && !(prev.Driver == status.Absent && r.known.identity.Name == ""):
		e = entry{slog.LevelInfo, MessageDriverGone, "driver is not ready"}
	case prev.Reason == next.Reason:
		return
	case next.Driver == status.Ready && next.Reason != "" && (next.Registration != status.Published || next.LastGetInfoAt.IsZero()):
		e = entry{slog.LevelDebug, MessageAttention, "needs attention"}
		if !r.logged.complaints.next(now).After(now) {
			e.level = slog.LevelWarn
			r.logged.complaints.take(now)
		}
	default:
		e.level, e.text = slog.LevelDebug, "reason changed"
	}
	r.logged.introduced = true
	attrs := []any{"MESSAGE_ID", e.id, "state", next.State, "driver_state", string(next.Driver), "registration", string(next.Registration)}
	if prev.State != "" && prev.State != next.State {
		attrs = append(attrs, "from", prev.State, "after", now.Sub(prev.Since).Round(time.Millisecond))
	}
	if next.Reason != "" {
		attrs = append(attrs, "reason", next.Reason)
	}
	r.log.Log(context.Background(), e.level, e.text, attrs...)
}
