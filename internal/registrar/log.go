package registrar

import (
	"context"
	"log/slog"
	"time"

	"csi-registrar/internal/status"
)

// Message IDs of the journal, one for each kind of entry. packaging/csi-registrar.catalog
// explains them for `journalctl -x`. Never reuse one.
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
	MessageHanging     = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c10e"
)

// logHistory records which entries about a driver were logged.
type logHistory struct {
	introduced bool        // its first state was logged
	complaints tokenBucket // limits entries about problems that only a person can fix
}

// entry is a log entry.
type entry struct {
	level slog.Level
	id    string
	text  string
}

// entered has the entry for each state that a driver enters.
var entered = map[string]entry{
	string(status.Absent):     {slog.LevelInfo, MessageAbsent, "waiting for the driver"},
	string(status.Starting):   {slog.LevelInfo, MessageStarting, "driver answers, but is not ready"},
	string(status.Ready):      {slog.LevelInfo, MessageReady, "driver is ready"},
	string(status.Hanging):    {slog.LevelWarn, MessageHanging, "driver does not answer"},
	string(status.Mismatch):   {slog.LevelWarn, MessageMismatch, "driver is not what was configured"},
	string(status.Published):  {slog.LevelInfo, MessagePublished, "registration socket published"},
	string(status.Registered): {slog.LevelInfo, MessageRegistered, "registered with the kubelet"},
	string(status.Refused):    {slog.LevelWarn, MessageRefused, "the kubelet refused the registration"},
	string(status.Conflict):   {slog.LevelWarn, MessageConflict, "another registrar is in the way"},
}

// logTransition logs a change of the state, or of the driver's state while its registration is
// kept. If only the reason changed, the entry has level debug: a driver that is absent for a
// day costs a few lines. While the driver is ready, a reason is a problem that only a person can
// fix, so it is logged as a warning.
func (r *Registrar) logTransition(prev, next status.Driver, now time.Time) {
	e, first := entered[next.State], !r.history.introduced
	switch {
	case first && next.State == string(status.Absent) && r.view.askedAt.IsZero():
		return // wait for the first answer, which has the reason
	case prev.State == "" && next.Registration == status.Registered:
		e.text = "still registered with the kubelet, by an earlier process"
	case first || prev.State != next.State:
		if next.State == string(status.Absent) && prev.Registration != "" && prev.Registration != status.None {
			e = entry{slog.LevelWarn, MessageWithdrawn, "registration is gone"}
		}
	case prev.Driver != next.Driver && next.Driver == status.Ready:
		e = entry{slog.LevelInfo, MessageDriverBack, "driver is ready again"}
	case prev.Driver != next.Driver && next.Driver == status.Hanging:
		e = entered[string(status.Hanging)]
	case prev.Driver != next.Driver && !(prev.Driver == status.Absent && r.view.identity.Name == ""):
		e = entry{slog.LevelInfo, MessageDriverGone, "driver is not ready"}
	case prev.Reason == next.Reason:
		return
	case next.Driver == status.Ready && next.Reason != "" && next.WithdrawalError == "" &&
		(next.Registration != status.Published || next.LastGetInfoAt.IsZero()):
		e = entry{slog.LevelDebug, MessageAttention, "needs attention"}
		if r.history.complaints.allow(now) {
			e.level = slog.LevelWarn
		}
	default:
		e.level, e.text = slog.LevelDebug, "reason changed"
	}
	r.history.introduced = true
	attrs := []any{"MESSAGE_ID", e.id, "state", next.State, "driver_state", string(next.Driver), "registration", string(next.Registration)}
	if prev.State != "" && prev.State != next.State {
		attrs = append(attrs, "from", prev.State, "after", now.Sub(prev.Since).Round(time.Millisecond))
	}
	if next.Reason != "" {
		attrs = append(attrs, "reason", next.Reason)
	}
	r.log.Log(context.Background(), e.level, e.text, attrs...)
}
