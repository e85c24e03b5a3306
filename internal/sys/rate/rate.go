// Package rate limits how often something is done.
package rate

import (
	"context"
	"math/rand/v2"
	"time"
)

// Bucket is a token bucket: it allows Burst events at once, and then one in each Interval. The
// caller provides the time and, between goroutines, the lock.
type Bucket struct {
	Burst    int
	Interval time.Duration

	full time.Time // when all tokens are there again
}

// Next returns when the next event is allowed: now or later.
func (b *Bucket) Next(now time.Time) time.Time {
	if at := b.full.Add(-time.Duration(b.Burst-1) * b.Interval); at.After(now) {
		return at
	}
	return now
}

// Take counts an event, also one that Next does not allow yet.
func (b *Bucket) Take(now time.Time) {
	if b.full.Before(now) {
		b.full = now
	}
	b.full = b.full.Add(b.Interval)
}

// Allow counts an event if it is allowed now, and reports whether it is.
func (b *Bucket) Allow(now time.Time) bool {
	if b.Next(now).After(now) {
		return false
	}
	b.Take(now)
	return true
}

// Pause waits for d, or until ctx is done, and reports whether ctx is not done.
func Pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// Hint gives a hint to a channel of capacity one. It does not wait: several hints become one.
func Hint(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Hinter receives hints from elsewhere and from its owner, so that one channel is enough to wait
// for both (implemented by fswatch.Subscription).
type Hinter interface {
	Hints() <-chan struct{} // capacity one
	Hint()                  // never blocks, also after Close
	Close()
}

// At returns a channel that receives at a time; zero: never.
func At(at time.Time) <-chan time.Time {
	if at.IsZero() {
		return nil
	}
	return time.After(time.Until(at))
}

// Earliest returns the earlier of two times, where zero means never.
func Earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Jitter varies d by up to 5 percent. It depends only on the time in nanoseconds, so that a run
// under virtual time can be repeated.
func Jitter(d time.Duration, now time.Time) time.Duration {
	return d - d/20 + time.Duration(rand.New(rand.NewPCG(uint64(now.UnixNano()), 0)).Int64N(int64(d/10)))
}
