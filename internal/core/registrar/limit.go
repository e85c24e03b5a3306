package registrar

import (
	"slices"
	"time"

	"csi-registrar/internal/node/status"
)

// publicationKind is which limit a publication has. Each publication costs the kubelet two writes
// of the CSINode and two of the Node; one of a registration that works also a second without the
// driver.
type publicationKind int

const (
	// alter changes a registration that is in place.
	alter publicationKind = iota
	// restore follows a removal or a replacement by others, or a refusal by the kubelet: without
	// it the driver is missing.
	restore
	// renew follows our own withdrawal, or is the first.
	renew
	// retake follows another registrar at the path. It does not count for the others.
	retake
)

// kindOf returns the kind of a publication, unless another registrar had the path.
func kindOf(cause Cause, last status.Notification) publicationKind {
	switch {
	case cause == CauseFirst:
		return renew
	case cause == CauseChanged && (last.Registered || last.At.IsZero()):
		return alter
	}
	return restore
}

const (
	limitWindow = time.Hour

	alterFree = 9               // made at once within the window
	alterMost = 12              // made within the window
	alterWait = 4 * time.Minute // beyond alterFree: how long the cause must have lasted

	restoreFree  = 20
	restoreFirst = 10 * time.Second // beyond restoreFree: from one to the next, doubling
	restoreMost  = time.Minute

	renewFree = 10          // the first publication and 9 more
	renewWait = time.Minute // beyond: how long the driver must have been ready

	retakeFree = 1
	retakeWait = 3 * time.Second // beyond: how long the path must have been free
)

// publications has the times of the publications within limitWindow, oldest first.
type publications [retake + 1][]time.Time

// count returns how many publications there were within the window.
func (p *publications) count(kind publicationKind, now time.Time) int {
	p[kind] = slices.DeleteFunc(p[kind], func(at time.Time) bool { return now.Sub(at) >= limitWindow })
	return len(p[kind])
}

// next returns when a publication is allowed; zero: at once. Its cause has lasted since the given
// time. freeSince is when the path became free; zero: it is not.
func (p *publications) next(kind publicationKind, since, freeSince, now time.Time) time.Time {
	switch n, made := p.count(kind, now), p[kind]; {
	case kind == alter && n >= alterMost:
		return later(since.Add(alterWait), made[n-alterMost].Add(limitWindow))
	case kind == alter && n >= alterFree:
		return since.Add(alterWait)
	case kind == restore && n >= restoreFree:
		return made[n-1].Add(min(restoreFirst<<min(n-restoreFree, 10), restoreMost))
	case kind == renew && n >= renewFree:
		return since.Add(renewWait)
	case kind == retake && n >= retakeFree:
		return freeSince.Add(retakeWait)
	}
	return time.Time{}
}
