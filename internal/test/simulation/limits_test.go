package simulation

import (
	"slices"
	"time"

	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/status"
)

// loss is what happened to the socket that was published last.
type loss int

const (
	replacedByUs loss = iota // nothing: it is in place
	removed                  // somebody removed it, or the kubelet refused it
	withdrawn                // by the daemon
	taken                    // another registrar, or a file, came to the path or the name
)

// lose notes a loss. A later one counts, unless something was in the way.
func (p *process) lose(driver string, by loss) {
	if p.lost[driver] != taken {
		p.lost[driver] = by
	}
	p.lostAt[driver] = time.Now()
}

// move is a publication.
type move struct {
	at time.Time
	of loss // what came before
}

// The limits within an hour, as ARCHITECTURE.md promises them.
const (
	freeChanges = 9 // of a registration that is in place, at once
	mostChanges = 12
	stable      = 4 * time.Minute // how long the others wait

	freeRemovals = 20 // restored at once; likewise what the kubelet refused
	mostRemovals = 60 // others, with pauses of up to a minute
	freePairs    = 9  // of withdrawal and publication, at once
	mostPairs    = 60
	longest      = time.Minute // that nothing is published
	soon         = 2 * time.Second
	leftFree     = 3 * time.Second // the path, after another registrar

	fastDisk = time.Millisecond // of a call
)

// within returns how many publications there were within an hour, for which one of the losses was
// the reason.
func (p *process) within(driver string, hour time.Duration, of ...loss) (n int) {
	for _, m := range p.moves[driver] {
		if time.Since(m.at) < hour && slices.Contains(of, m.of) {
			n++
		}
	}
	return n
}

// countMove counts a publication in place of old, and checks the limits.
func (w *world) countMove(p *process, driver, cause string, old *sock) {
	of, known := p.lost[driver], p.moves[driver]
	refused := old != nil && old.told != nil && !old.told.Registered && old.toldAt.Before(p.causedAt[driver])
	if of == replacedByUs && (refused || cause == string(registrar.CauseSilent)) {
		of = removed
	}
	w.checkLeft(p, driver, cause, of)
	delete(p.lost, driver)
	if besides := w.files.nodes[w.besides(w.driver(driver))]; besides != nil {
		p.lost[driver] = taken
	}
	// Another registrar that was gone again at once may not have been noticed.
	if cause == string(registrar.CauseAsked) && of != taken {
		return
	}
	const hour = time.Hour - changeTime
	changes := p.within(driver, hour, replacedByUs)
	all := p.within(driver, hour, replacedByUs, removed, withdrawn)
	removals := p.within(driver, hour, removed)
	var last, lastRemoval time.Time
	for _, m := range known {
		last = m.at
		if m.of == removed {
			lastRemoval = m.at
		}
	}
	p.moves[driver] = append(known, move{time.Now(), of})
	if w.files.latency > slowDisk {
		return
	}
	faults := p.asked[driver] + p.faults // what failed after all is repeated
	switch {
	case of == replacedByUs && changes-faults >= mostChanges:
		w.violated("at most 12 changes an hour", "%s: %d within an hour", driver, changes+1)
	case of != taken && all-faults >= mostChanges+mostRemovals+mostPairs:
		w.violated("at most 12 + 60 + 60 publications an hour", "%s: %d within an hour", driver, all+1)
	case of == replacedByUs && changes-faults >= freeChanges && time.Since(last) < stable-changeTime && !w.disturbed(p):
		w.violated("after 9 changes an hour the next waits", "%s: number %d, %s after the one before", driver, changes+1, time.Since(last))
	case of == removed && removals-faults > freeRemovals && time.Since(lastRemoval) < 10*time.Second-changeTime && !w.disturbed(p):
		w.violated("after 20 removals an hour the next waits", "%s: number %d, %s after the one before", driver, removals+1, time.Since(lastRemoval))
	}
}

// checkLeft: from the second time within an hour, the path is left to another registrar until it
// has been free for a while.
func (w *world) checkLeft(p *process, driver, cause string, of loss) {
	conflict, before, left := p.conflicts[driver], p.retaken[driver], w.of(driver).leftAt
	delete(p.conflicts, driver)
	if of != taken || !conflict {
		return
	}
	p.retaken[driver] = append(before, time.Now())
	again := len(before) > 0 && time.Since(before[len(before)-1]) < time.Hour-changeTime
	// A try that is under way may have begun before.
	underWay := w.files.latency > fastDisk || w.disturbed(p) || time.Since(left) < 10*time.Millisecond
	const asked = string(registrar.CauseAsked)
	if again && cause != asked && !slices.Contains(p.causes[driver], asked) && !underWay && !left.IsZero() && time.Since(left) < leftFree {
		w.violated("the path is left to another registrar", "%s is published %s after it was left", driver, time.Since(left))
	}
}

// mayWait returns how long the daemon may leave a driver unpublished that serves.
func (p *process) mayWait(driver string) time.Duration {
	const hour = time.Hour + changeTime
	by, others := p.lost[driver], p.within(driver, hour, taken)
	switch {
	case by != withdrawn && p.within(driver, hour, removed)+others >= freeRemovals,
		by != removed && p.within(driver, hour, withdrawn)+others >= freePairs:
		return longest + soon
	case by == taken && others > 0:
		return leftFree + soon
	}
	return soon
}

// checkMissing: a driver that serves and is not published is published soon, if nothing hinders the
// daemon.
func (w *world) checkMissing(p *process, d *csiDriver, s *status.Driver) {
	h := w.of(d.name)
	from := w.freeSince
	for _, at := range []time.Time{
		w.undamagedSince, p.lostAt[d.name], d.noticed, p.started.Add(patience), w.admin.editedAt.Add(patience), w.besidesAt.Add(2 * patience), h.unwantedAt.Add(patience),
	} {
		if at.After(from) {
			from = at
		}
	}
	waits, limit := time.Since(from), p.mayWait(d.name)
	if waits > limit {
		w.violated("a driver that serves is published", "%s is not for %s, and may wait for %s: %s: %s", d.name, waits, limit, s.State, s.Reason)
	}
}

// checkDelay: nothing is delayed that need not be, and for no longer.
func (w *world) checkDelay(p *process, s *status.Driver) {
	unwanted := w.of(s.Name).unwantedAt // its registrar may have ended then, or not
	if s.DampedUntil.IsZero() || p.troubled || w.files.latency > slowDisk || !unwanted.IsZero() && time.Since(unwanted) < time.Hour+changeTime {
		return
	}
	if missing := s.Registration == status.None || s.Registration == status.Refused; missing && time.Until(s.DampedUntil) > longest {
		w.violated("a registration that is missing waits for a minute at most", "%s, until %s: %s", s.Name, s.DampedUntil, s.Reason)
	}
	const hour = time.Hour + changeTime
	var until time.Time
	allow := func(ok bool, at time.Time) {
		if ok && at.After(until) {
			until = at
		}
	}
	others := p.within(s.Name, hour, taken)
	changes := p.within(s.Name, hour+stable, replacedByUs, removed)
	allow(changes >= freeChanges, time.Now().Add(stable))
	if changes >= mostChanges {
		n := 0
		for _, m := range p.moves[s.Name] {
			if m.of == replacedByUs || m.of == removed {
				n++
			}
		}
		for _, m := range p.moves[s.Name] {
			if m.of != replacedByUs && m.of != removed {
				continue
			}
			if n == mostChanges {
				allow(true, m.at.Add(time.Hour))
			}
			n--
		}
	}
	allow(p.within(s.Name, hour, removed)+others >= freeRemovals, time.Now().Add(longest))
	allow(p.within(s.Name, hour, withdrawn)+others >= freePairs, time.Now().Add(longest))
	allow(others > 0, time.Now().Add(leftFree))
	if until.IsZero() || s.DampedUntil.After(until.Add(changeTime)) {
		w.violated("no change waits longer than needed", "%s, after %+v, until %s: %s", s.Name, p.moves[s.Name], s.DampedUntil, s.Reason)
	}
}
