package registrar

import (
	"time"

	"csi-registrar/internal/status"
)

// How often a driver that is not ready is asked: NodeGetInfo may be a request to a cloud that is
// overloaded already.
const (
	backoffEager = 10 * time.Second // each second for this time
	backoffMost  = 30 * time.Second // then doubling up to this
)

// Backoff computes when to ask a driver again that answers but is not ready. The zero value is
// ready to use.
type Backoff struct {
	since      time.Time // of the first failure
	pause      time.Duration
	connection uint64
	silent     bool
}

// Next returns how long to wait after a report. A new connection starts the backoff again, unless
// it was made because the driver was silent.
func (b *Backoff) Next(rep status.Report, now time.Time) time.Duration {
	if rep.Connection == 0 { // what was asked costs the driver nothing
		return jitter(askStarting)
	}
	if b.since.IsZero() || rep.Connection != b.connection && !b.silent {
		*b = Backoff{since: now}
	}
	b.connection, b.silent = rep.Connection, rep.Silent
	if b.pause = min(max(2*b.pause, askStarting), backoffMost); now.Sub(b.since) < backoffEager {
		b.pause = askStarting
	}
	return jitter(b.pause)
}
