package simulation

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/registrar"
	"csi-registrar/internal/status"
)

const (
	eventsOfASeed = 50
	quietTime     = 5 * time.Minute
)

// simulate lets events happen to a new node under virtual time, heals it, and waits until all is as
// it is to be. It returns what must never be, and was; empty: nothing.
func simulate(t *testing.T, seed uint64, events []event, seen *coverage, story bool) (violation string, lines []string) {
	null, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(null)
	synctest.Test(t, func(*testing.T) {
		w := newWorld(null, seed, seen)
		if story {
			w.story = []string{}
		}
		w.mu.Lock()
		w.startDaemon()
		w.mu.Unlock()
		synctest.Wait()
		for _, e := range events {
			if w.hasFailed() {
				break
			}
			time.Sleep(e.after)
			synctest.Wait()
			w.check() // what was wrong for a moment is right again
			w.do(e)
			synctest.Wait()
			w.check()
			seen.events++
		}
		if !w.hasFailed() {
			w.quiet(seed)
		}
		violation, lines = w.violation, w.story
		w.end()
	})
	return violation, lines
}

func (w *world) hasFailed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.violation != ""
}

// quiet heals everything and expects the desired state within 5 minutes, or when the limit of
// changes allows it.
func (w *world) quiet(seed uint64) {
	w.mu.Lock()
	w.tell("all is healed")
	for _, m := range w.files.mounts {
		m.thaw()
		m.err = 0
	}
	w.pid1.busy, w.kubelet.apiErr = false, ""
	w.mend()
	for i, d := range w.drivers {
		w.endSidecars(d, true)
		if n := w.files.nodes[socketOf(d.name)]; n != nil && n.maker == "admin" {
			w.files.drop(socketOf(d.name))
		}
		if d.state != "down" || (seed>>i)%3 > 0 {
			d.set("up")
		}
		for _, name := range sortedKeys(w.admin.traces) {
			w.endTrace(w.admin.traces[name])
		}
	}
	if d := w.files.nodes[registry]; !w.kubelet.running || d == nil || d.Ino != w.kubelet.watched {
		w.kubelet.stop()
		w.kubelet.start()
	}
	w.mu.Unlock()
	for start, damped := time.Now(), false; ; {
		time.Sleep(15 * time.Second)
		synctest.Wait()
		w.check()
		w.mu.Lock()
		running := w.process != nil
		w.mu.Unlock()
		why := "the daemon does not run"
		if running {
			why = w.unsettled()
		}
		if w.hasFailed() {
			return
		}
		elapsed := time.Since(start)
		if elapsed >= time.Minute && why == "" {
			return
		}
		if running && w.dampedUntil().After(time.Now()) && elapsed < 2*time.Hour {
			damped = true
			continue
		}
		if damped { // from now on
			start, damped = time.Now(), false
			continue
		}
		if elapsed > quietTime {
			w.mu.Lock()
			w.violated("in the end all is as it is to be", "after %s: %s", elapsed, why)
			w.mu.Unlock()
			return
		}
	}
}

// end ends all processes.
func (w *world) end() {
	w.mu.Lock()
	w.over = true
	w.kubelet.stop()
	for _, d := range w.drivers {
		d.reset()
	}
	for _, name := range sortedKeys(w.admin.traces) {
		w.endTrace(w.admin.traces[name])
	}
	for _, m := range w.files.mounts {
		m.thaw()
	}
	p := w.process
	if p != nil {
		p.stop(true)
	}
	w.mu.Unlock()
	time.Sleep(5 * time.Minute)
}

// run is a run of a seed.
func run(t *testing.T, seed uint64, n int, seen *coverage) string {
	violation, _ := simulate(t, seed, eventsOf(seed, n), seen, false)
	return violation
}

// shorten removes events for as long as the same rule is broken, and tells the story.
func shorten(t *testing.T, seed uint64, events []event, violation string) string {
	rule, _, _ := strings.Cut(violation, ":")
	fails := func(events []event) bool {
		for range 3 {
			got, _ := simulate(t, seed, events, newCoverage(), false)
			if strings.HasPrefix(got, rule) {
				return true
			}
		}
		return false
	}
	for size := len(events) / 2; size > 0; {
		removed := false
		for at := 0; at+size <= len(events); {
			rest := append(append([]event{}, events[:at]...), events[at+size:]...)
			if at < len(rest) { // the time that passes stays
				rest[at].after += duration(events[at : at+size])
			}
			if fails(rest) {
				events, removed = rest, true
			} else {
				at += size
			}
		}
		if !removed {
			size /= 2
		}
	}
	for range 5 {
		got, story := simulate(t, seed, events, newCoverage(), true)
		if strings.HasPrefix(got, rule) {
			return fmt.Sprintf("seed %d, %d events: %s\n%s", seed, len(events), got, strings.Join(story, "\n"))
		}
	}
	return fmt.Sprintf("seed %d: %s, but not always with %d events: %v", seed, violation, len(events), events)
}

func duration(events []event) (d time.Duration) {
	for _, e := range events {
		d += e.after
	}
	return d
}

func newCoverage() *coverage { return &coverage{causes: map[string]int{}, states: map[string]int{}} }

func fromEnv(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// TestSimulation runs seeds: SIMULATION_SEEDS of them, from SIMULATION_SEED on.
func TestSimulation(t *testing.T) {
	seeds, first := fromEnv("SIMULATION_SEEDS", 500), fromEnv("SIMULATION_SEED", 1)
	if testing.Short() {
		seeds = min(seeds, 50)
	}
	began := time.Now()
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	var next, failed atomic.Int64
	var mu sync.Mutex
	total := newCoverage()
	failures := map[uint64]string{}
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			seen := newCoverage()
			for {
				i := int(next.Add(1)) - 1
				if i >= seeds || failed.Load() >= 20 {
					break
				}
				seed := uint64(first + i)
				if v := run(t, seed, eventsOfASeed, seen); v != "" {
					failed.Add(1)
					mu.Lock()
					failures[seed] = v
					mu.Unlock()
				}
			}
			mu.Lock()
			defer mu.Unlock()
			total.add(seen)
		})
	}
	workers.Wait()
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	t.Logf("%d events in %d seeds, %s, %s of CPU; causes %v, states %v", total.events, min(seeds, int(next.Load())),
		time.Since(began).Round(time.Millisecond), cpu.Round(time.Millisecond), total.causes, total.states)
	told := map[string]bool{}
	for seed, v := range failures {
		rule, _, _ := strings.Cut(v, ":")
		t.Errorf("seed %d: %s", seed, v)
		if !told[rule] && os.Getenv("SIMULATION_STORY") != "0" {
			told[rule] = true
			t.Log(shorten(t, seed, eventsOf(seed, eventsOfASeed), v))
		}
	}
	if seeds >= 20000 {
		for _, c := range []registrar.Cause{registrar.CauseFirst, registrar.CauseRemoved, registrar.CauseReplaced, registrar.CauseChanged,
			registrar.CauseAsked, registrar.CauseReturned, registrar.CauseSilent, registrar.CauseGone, registrar.CauseMismatch, registrar.CauseLeaving} {
			if total.causes[string(c)] < 100 {
				t.Errorf("the cause %q was reached %d times", c, total.causes[string(c)])
			}
		}
		for _, s := range []string{"absent", "starting", "ready", "mismatch", "published", "registered", "refused", "conflict", status.Disabled} {
			if total.states[s] < 100 {
				t.Errorf("the state %q was reached %d times", s, total.states[s])
			}
		}
	}
}

func (c *coverage) add(o *coverage) {
	c.events += o.events
	for k, n := range o.causes {
		c.causes[k] += n
	}
	for k, n := range o.states {
		c.states[k] += n
	}
}
