package registrar

import "time"

// pace allows a burst of things, then one every while: a cause that never ends, as a driver that
// flaps, cannot keep us busy.
type pace struct {
	burst int
	every time.Duration
	whole time.Time // when all of the burst is there again
}

// next returns when the next thing is allowed: now or later.
func (p *pace) next(now time.Time) time.Time {
	return later(now, p.whole.Add(-time.Duration(p.burst-1)*p.every))
}

func (p *pace) take(now time.Time) { p.whole = later(now, p.whole).Add(p.every) }

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
