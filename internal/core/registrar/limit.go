package registrar

import "time"

// tokenBucket allows burst events at once, and then one in each interval.
type tokenBucket struct {
	burst    int
	interval time.Duration
	full     time.Time // when it is full again
}

// next returns when the next event is allowed: now or later.
func (b *tokenBucket) next(now time.Time) time.Time {
	return later(now, b.full.Add(-time.Duration(b.burst-1)*b.interval))
}

// allow takes an event if one is allowed now.
func (b *tokenBucket) allow(now time.Time) bool {
	ok := !b.next(now).After(now)
	if ok {
		b.take(now)
	}
	return ok
}

func (b *tokenBucket) take(now time.Time) { b.full = later(now, b.full).Add(b.interval) }

// The limit for changes of a registration socket, whatever the cause. Each change costs the
// kubelet two writes of the CSINode and two of the Node, and a second without the driver.
const (
	churnWindow = time.Hour
	churnFree   = 9               // changes within the window that are made at once
	churnMost   = 12              // changes allowed within the window
	churnStable = 4 * time.Minute // beyond churnFree: how long the cause must have lasted
)

// churn has the times of the changes within the window, oldest first.
type churn []time.Time

func (c *churn) count(now time.Time) int {
	for len(*c) > 0 && now.Sub((*c)[0]) >= churnWindow {
		*c = (*c)[1:]
	}
	return len(*c)
}

// next returns when a change is allowed if its cause has lasted since the given time. After many
// changes a cause that ends within churnStable causes none. One that lasts causes a change
// within 5 minutes, unless that would be more than churnMost in an hour.
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
