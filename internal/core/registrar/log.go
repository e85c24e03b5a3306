package registrar

import (
	"context"
	"log/slog"
	"time"

	"csi-registrar/internal/node/status"
)

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
