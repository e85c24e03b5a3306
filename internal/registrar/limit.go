package registrar

import "time"

// A bucket allows a burst of things, then one every while: a cause that never ends, as a
// driver that flaps, cannot keep us busy.
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

// next returns when the next thing is allowed: now or later.
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

// The one limit for changes of a registration socket, whatever the cause. Each costs the
// kubelet two writes of the CSINode and of the Node, and a second without the driver.
const (
	churnWindow = time.Hour
	churnFree   = 9               // changes within the window that are made at once
	churnMost   = 12              // changes within the window
	churnStable = 4 * time.Minute // from churnFree on: how long the cause must have stood unchanged
)

// churn remembers the changes within the window, oldest first.
type churn []time.Time

func (c *churn) count(now time.Time) int {
	for len(*c) > 0 && now.Sub((*c)[0]) >= churnWindow {
		*c = (*c)[1:]
	}
	return len(*c)
}

func (c *churn) add(now time.Time) { *c = append(*c, now) }

// next returns when a change is allowed whose cause stands since a time. What is over within
// churnStable is never worth a change once there were many; what stays is followed within 5
// minutes, but for the rare cause that comes again just as often.
func (c *churn) next(since, now time.Time) time.Time {
	n := c.count(now)
	switch {
	case n < churnFree:
		return since
	case n < churnMost:
		return since.Add(churnStable)
	}
	return later(since.Add(churnStable), (*c)[n-churnMost].Add(churnWindow))
}
