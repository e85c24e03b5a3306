package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"time"

	"csi-registrar/internal/test/fake"
)

// Measurements of drivers without faults.
const (
	served   = "from: driver serves, to: its registration socket accepts"
	succeeds = "from: a hanging driver is replaced, to: its registration socket accepts"
	restored = "from: registration socket removed, to: it accepts again"
	starts   = "from: start of the daemon, to: READY=1"
)

// Faults of others during a measurement.
const (
	quiet      = "no faults"
	faults     = "other faults"
	fsHangs    = "file system hangs"
	slowSystem = "service manager slow or stopped"
)

// allowed is by how much a measurement during faults may exceed twice the time without faults: a
// publication waits 0.3 s for a new socket that does not answer, and as long for the service
// manager to confirm the old and the new socket.
var allowed = map[string]time.Duration{faults: 400 * ms, fsHangs: 400 * ms, slowSystem: time.Second}

const (
	roundsQuiet   = 3 // two changes each; nine are not delayed
	changesAtMost = 7 // so that none is damped
	enough        = 5 // measurements for a conclusion
	gaveUpAfter   = 5 * time.Second
	quietMost     = 2 * time.Second // limit of a median without faults
)

// took records a duration, unless a fault of the daemon itself or of the whole directory explains
// it.
func (w *world) took(what string, from time.Time, long time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.awayAt.After(from.Add(-time.Second)) || w.registryAt.After(from.Add(-2*time.Second)) {
		return
	}
	w.noteTime(what, from, long)
}

func (w *world) noteTime(what string, from time.Time, long time.Duration) {
	during := faults
	switch {
	case !w.chaos:
		during = quiet
	case w.managerBusy(from):
		during = slowSystem
	case w.hanging():
		during = fsHangs
	}
	if w.times[what] == nil {
		w.times[what] = map[string][]time.Duration{}
	}
	w.times[what][during] = append(w.times[what][during], long)
}

// compare reports which measurements took too long while there were faults.
func (w *world) compare() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, what := range []string{served, succeeds, restored, starts} {
		usual := median(w.times[what][quiet])
		for _, during := range []string{quiet, faults, fsHangs, slowSystem} {
			all := w.times[what][during]
			if len(all) == 0 {
				continue
			}
			m := median(all)
			w.t.Logf("%s; %s: %d times, median %s, most %s", what, during, len(all), m.Round(ms/10), slices.Max(all).Round(ms/10))
			limit := 2*usual + allowed[during]
			if what == starts {
				limit += time.Second
			}
			if during == quiet {
				limit = quietMost
			}
			if usual > 0 && len(all) >= enough && m > limit {
				w.violated("%s; %s: median %s, without faults %s", what, during, m, usual)
			}
		}
	}
}

func median(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

// measure starts a driver and removes its registration socket, for the given number of rounds or
// until ctx is done. At the end the driver runs.
func (w *world) measure(ctx context.Context, d *Driver, rounds int) error {
	daemons, changes := 0, 0
	for i := 0; ctx.Err() == nil && i < rounds; {
		w.mu.Lock()
		if n := w.figures["daemons"]; n != daemons { // a new daemon counts from zero
			daemons, changes = n, 0
		}
		w.mu.Unlock()
		if changes+2 > changesAtMost {
			sleep(ctx, 50*ms)
			continue
		}
		changes += 2
		if err := w.round(ctx, d, i%3 == 1); err != nil {
			return err
		}
		i++
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.up(d)
}

// round measures once; the driver may hang at first, and be replaced.
func (w *world) round(ctx context.Context, d *Driver, hangs bool) error {
	w.mu.Lock()
	w.history.note(d.name, byDriver, "stopped")
	w.mu.Unlock()
	path := w.pathOf(d)
	if err := d.stop(false); err != nil || !await(ctx, func() bool { return !accepts(path) }) {
		return err
	}
	what, from := served, time.Now()
	calls := d.Calls(fake.NodeGetInfo)
	if hangs {
		what = succeeds
		d.hangIn(fake.NodeGetInfo)
	}
	w.mu.Lock()
	err := w.up(d)
	w.mu.Unlock()
	if err == nil && hangs {
		await(ctx, func() bool { return d.Calls(fake.NodeGetInfo) > calls })
		from = time.Now()
		err = d.replace()
	}
	if err != nil || ctx.Err() != nil {
		return err
	}
	if await(ctx, func() bool { return accepts(path) }); ctx.Err() != nil {
		return nil
	}
	w.took(what, from, time.Since(from))

	w.mu.Lock()
	w.history.note(d.name, onPath, "removed")
	err, from = gone(os.Remove(path)), time.Now()
	w.mu.Unlock()
	if err != nil {
		return err
	}
	if await(ctx, func() bool { return accepts(path) }); ctx.Err() == nil {
		w.took(restored, from, time.Since(from))
	}
	sleep(ctx, time.Duration(rand.IntN(1000))*ms)
	return nil
}

// accepts reports whether a process listens at the path.
func accepts(path string) bool {
	c, err := net.Dial("unix", path)
	if err != nil {
		return false
	}
	return c.Close() == nil
}

// await polls for a condition that has no event, for a limited time.
func await(ctx context.Context, is func() bool) bool {
	for end := time.Now().Add(gaveUpAfter); !is(); sleep(ctx, ms) {
		if ctx.Err() != nil || time.Now().After(end) {
			return false
		}
	}
	return true
}

func sleep(ctx context.Context, long time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(long):
	}
}

// measureQuietly measures while there are no faults.
func (w *world) measureQuietly() error {
	return w.beside(func() error { return nil }, roundsQuiet)
}

// beside runs f while the measured drivers are measured, for at least the given number of rounds.
// If rounds is zero, others flap meanwhile.
func (w *world) beside(f func() error, rounds int) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, len(w.drivers))
	running := 0
	start := func(f func() error) {
		running++
		go func() { ended <- f() }()
	}
	for _, d := range w.drivers {
		switch {
		case d.role == measured && rounds > 0:
			start(func() error { return w.measure(ctx, d, rounds) })
		case d.role == measured:
			start(func() error { return w.measure(ctx, d, 1<<30) })
		case d.role == flapping && rounds == 0:
			start(func() error { return w.flap(ctx, d) })
		}
	}
	err := f()
	if rounds == 0 {
		stop()
	}
	for range running {
		if e := <-ended; e != nil {
			err = errors.Join(err, fmt.Errorf("measuring: %w", e))
		}
	}
	return err
}

// flap makes a driver alternate between ready and mismatch. At the end it is ready.
func (w *world) flap(ctx context.Context, d *Driver) error {
	for ctx.Err() == nil {
		for _, act := range []string{"driver lie", "driver truth"} {
			w.mu.Lock()
			err := actions[act](w, Step{}, d)
			w.mu.Unlock()
			if err != nil {
				return err
			}
			sleep(ctx, time.Duration(50+rand.IntN(200))*ms)
		}
	}
	return nil
}
