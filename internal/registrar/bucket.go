package registrar

import "time"

// A bucket allows a burst of things, then one a while. It is what keeps a cause that
// never ends (a script that removes the socket for ever, a driver that invents a new
// node id at each start) from making the kubelet, or us, busy for ever.
type bucket struct {
	most  int
	every time.Duration
	left  int
	since time.Time // when left was last brought up to date
}

func newBucket(most int, every time.Duration) bucket {
	return bucket{most: most, every: every, left: most}
}

func (b *bucket) fill(now time.Time) {
	n := now.Sub(b.since) / b.every
	if b.since.IsZero() || int64(n) >= int64(b.most-b.left) {
		b.left, b.since = b.most, now
		return
	}
	b.left += int(n)
	b.since = b.since.Add(n * b.every)
}

// next tells when the next thing is allowed: now or later.
func (b *bucket) next(now time.Time) time.Time {
	b.fill(now)
	if b.left > 0 {
		return now
	}
	return b.since.Add(b.every)
}

func (b *bucket) take(now time.Time) {
	b.fill(now)
	b.left = max(b.left-1, 0)
}
