package driver

import (
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

// How often a driver that is not ready is asked without a hint. Jitter keeps many drivers out of
// step.
const (
	askFirst   = time.Second      // then doubling up to askMost
	askMost    = 30 * time.Second // NodeGetInfo may be a request to an overloaded cloud
	askEager   = 10 * time.Second // a driver that answers is asked more often for this time
	askHanging = 3 * time.Second  // a driver that hangs, after the end of the last call
	// A driver that recovers within askEager is registered in 1.5 s, including the second in which
	// the kubelet notices the socket. In an hour it is asked at most 150 times.
	askEagerly = 475 * time.Millisecond
)

// backoff computes when to ask a driver again that is not ready. The zero value is ready to use.
type backoff struct {
	since      time.Time // of the first answer that was not ready; zero: the driver is absent
	pause      time.Duration
	connection uint64
	silent     bool
}

// next returns how long to wait after a report. A new connection starts the backoff again, unless
// it was made because the driver was silent.
func (b *backoff) next(rep status.Report, now time.Time) time.Duration {
	answered := rep.Driver == status.Starting
	switch {
	case answered && rep.Connection == 0: // only cheap calls were made
		if b.since.IsZero() {
			b.pause = 0
		}
		return rate.Jitter(askFirst, now)
	case answered && (b.since.IsZero() || rep.Connection != b.connection && !b.silent):
		*b = backoff{since: now}
	case !answered && !b.since.IsZero():
		*b = backoff{}
	}
	b.connection, b.silent = rep.Connection, rep.Silent
	if answered && now.Sub(b.since) < askEager {
		b.pause = 0
		return rate.Jitter(askEagerly, now)
	}
	b.pause = min(max(2*b.pause, askFirst), askMost)
	return rate.Jitter(b.pause, now)
}
