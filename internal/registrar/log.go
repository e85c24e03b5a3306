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

// logTransition writes one entry for a change of state, and one for a driver that goes or
// comes back under a registration that stays. A reason that alone changed is for debugging:
// a driver that is absent for a day costs a few lines. Only while the driver is ready is
// a reason something that nobody but a person can fix, so it is said.
func (r *Registrar) logTransition(prev, next status.Driver, now time.Time) {
	attrs := []any{"state", next.State, "driver_state", string(next.Driver), "registration", string(next.Registration)}
	if prev.State != "" && prev.State != next.State {
		attrs = append(attrs, "from", prev.State, "after", now.Sub(prev.Since).Round(time.Millisecond))
	}
	if next.Reason != "" {
		attrs = append(attrs, "reason", next.Reason)
	}
	level, id, text := describe(prev, next)
	if !r.logged.introduced && next.State == string(status.Absent) && r.known.startedAt.IsZero() {
		return // nothing is known before the first answer
	}
	first := !r.logged.introduced
	r.logged.introduced = true
	switch {
	case prev.State != next.State || first:
	case prev.Driver != next.Driver && !(prev.Driver == status.Absent && r.known.identity.Name == ""):
		id, text = driverChange(next)
		level = slog.LevelInfo
	case prev.Reason == next.Reason:
		return
	case next.Driver == status.Ready && next.Reason != "" && (next.Registration != status.Published || next.LastGetInfoAt.IsZero()):
		id, text = MessageAttention, "needs attention"
		if level = slog.LevelDebug; !r.logged.complaints.next(now).After(now) {
			level = slog.LevelWarn
			r.logged.complaints.take(now)
		}
	default:
		level, text = slog.LevelDebug, "reason changed"
	}
	r.log.Log(context.Background(), level, text, append([]any{"MESSAGE_ID", id}, attrs...)...)
}

// describe names a state as a line of the log.
func describe(prev, next status.Driver) (slog.Level, string, string) {
	switch next.State {
	case string(status.Absent):
		if prev.Registration != "" && prev.Registration != status.None {
			return slog.LevelWarn, MessageWithdrawn, "registration is gone"
		}
		return slog.LevelInfo, MessageAbsent, "waiting for the driver"
	case string(status.Starting):
		return slog.LevelInfo, MessageStarting, "driver answers, but is not ready"
	case string(status.Ready):
		return slog.LevelInfo, MessageReady, "driver is ready"
	case string(status.Mismatch):
		return slog.LevelWarn, MessageMismatch, "driver is not what was configured"
	case string(status.Published):
		return slog.LevelInfo, MessagePublished, "registration socket published"
	case string(status.Registered):
		if prev.State == "" {
			return slog.LevelInfo, MessageRegistered, "still registered with the kubelet, by an earlier process"
		}
		return slog.LevelInfo, MessageRegistered, "registered with the kubelet"
	case string(status.Refused):
		return slog.LevelWarn, MessageRefused, "the kubelet refused the registration"
	default:
		return slog.LevelWarn, MessageConflict, "another registrar is in the way"
	}
}

func driverChange(next status.Driver) (id, text string) {
	if next.Driver == status.Ready {
		return MessageDriverBack, "driver is ready again"
	}
	return MessageDriverGone, "driver is not ready"
}
