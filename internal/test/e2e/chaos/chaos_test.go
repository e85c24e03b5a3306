package chaos

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
)

// The flags' defaults come from the environment, for `make chaos`.
var (
	seeds    = flag.String("chaos.seed", os.Getenv("CHAOS_SEED"), "`SEED`s to run side by side, with commas; \"fresh\" is one that was never used")
	drivers  = flag.String("chaos.drivers", os.Getenv("CHAOS_DRIVERS"), "how many drivers")
	duration = flag.String("chaos.duration", os.Getenv("CHAOS_DURATION"), "how long there is chaos, before it settles")
	keep     = flag.Bool("chaos.keep", os.Getenv("CHAOS_KEEP") != "", "keep the test's directory, with the log, also where nothing was wrong")
)

func TestChaos(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("it needs root, and under CI=true it must run")
		}
		t.Skip("it needs root: files of the configuration and sockets of drivers are root's")
	}
	many, long := 16, 20*time.Second
	if *drivers != "" {
		if _, err := fmt.Sscan(*drivers, &many); err != nil || many < 1 || many > 99 {
			t.Fatalf("chaos.drivers=%q: give a number from 1 to 99", *drivers)
		}
	}
	if *duration != "" {
		var err error
		if long, err = time.ParseDuration(*duration); err != nil {
			t.Fatal(err)
		}
	}
	if *seeds == "" {
		*seeds = "fresh"
	}
	bin := built.Registrar(t)
	for s := range strings.SplitSeq(*seeds, ",") {
		seed := rand.Uint64()
		if s != "fresh" {
			if _, err := fmt.Sscan(s, &seed); err != nil {
				t.Fatalf("chaos.seed=%q: %v", s, err)
			}
		}
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			run(t, bin, seed, many, long)
		})
	}
}

func run(t *testing.T, bin string, seed uint64, many int, long time.Duration) {
	fmt.Printf("chaos: CHAOS_SEED=%d CHAOS_DRIVERS=%d CHAOS_DURATION=%s\n", seed, many, long)
	w, err := newWorld(t, bin, seed, many)
	if err != nil {
		t.Fatal(err)
	}
	w.keep = *keep
	defer w.close()
	// After a failure the whole history stays.
	defer func() {
		for _, why := range w.failed() {
			t.Errorf("%s", why)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, what := range slices.Sorted(maps.Keys(w.figures)) {
			t.Logf("%6d %s", w.figures[what], what)
		}
		if t.Failed() || w.keep {
			t.Logf("the log is %s; replay with CHAOS_SEED=%d CHAOS_DRIVERS=%d CHAOS_DURATION=%s make chaos", w.log.Name(), seed, many, long)
		}
	}()
	w.mu.Lock()
	err = w.startDaemon("--keep-sockets")
	if err == nil {
		err = w.startKubelet()
	}
	w.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if w.noFS != nil {
		t.Run("file system that hangs", func(t *testing.T) {
			if os.Getenv("CI") == "true" {
				t.Fatalf("it needs /dev/fuse, and under CI=true it must run: %v", w.noFS)
			}
			t.Skip(w.noFS)
		})
	}
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		t.Errorf("not registered at the start:\n  %s", why)
		return
	}
	if err := w.measureQuietly(); err != nil {
		t.Error(err)
		return
	}
	w.setChaos(true)
	if err := w.beside(func() error { return w.disturb(long) }, 0); err != nil {
		t.Error(err)
	}
	if len(w.failed()) == 0 && !t.Failed() {
		w.settles(long)
	}
	w.compare()
}

func (w *world) setChaos(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.chaos = on
}

// disturb carries out the plan for the given time, and checks the node meanwhile.
func (w *world) disturb(long time.Duration) (err error) {
	stop, checked := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(checked)
		tick := time.NewTicker(checkEvery)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case now := <-tick.C:
				w.check(now)
			}
		}
	}()
	begun := time.Now()
	var behind time.Duration
	for len(w.failed()) == 0 {
		s := w.plan.Next()
		if s.At > long {
			break
		}
		if wait := s.At - time.Since(begun); wait > 0 {
			time.Sleep(wait) // the plan's own time
		} else {
			behind = max(behind, -wait)
		}
		if err = w.do(s); err != nil {
			break
		}
	}
	close(stop)
	<-checked
	w.t.Logf("at most %s behind the plan", behind.Round(time.Millisecond))
	return err
}

// settles ends all faults and checks that everything recovers and nothing was leaked.
func (w *world) settles(long time.Duration) {
	t := w.t
	if err := w.calm(); err != nil {
		t.Error(err)
		return
	}
	w.say("calm")
	w.setChaos(false)
	begun := time.Now()
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		t.Errorf("not settled within %s:\n  %s", settlesWithin, why)
		for name := range w.byName {
			if strings.Contains(why, name) {
				t.Logf("%s: %s", name, w.history.story(name))
			}
		}
		return
	}
	t.Logf("settled after %s; damped: %v", time.Since(begun).Round(time.Millisecond), w.damped)
	if why := w.leftovers(); why != "" {
		t.Errorf("dot names are left: %s", why)
	}
	descriptors, goroutines, open, err := w.atRest()
	if err != nil {
		t.Error(err)
		return
	}

	if err := w.restartWhileManagerStops(); err != nil {
		t.Error(err)
		return
	}
	// A daemon that starts now holds as many resources, and the kubelet does not notice the
	// restart, even if a file system hangs meanwhile.
	w.mu.Lock()
	before, waiting := maps.Clone(w.events), maps.Clone(w.damped)
	w.mu.Unlock()
	if err := w.startWhileFSHangs(); err != nil {
		t.Error(err)
		return
	}
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		t.Errorf("not registered after the file system answered again:\n  %s", why)
		return
	}
	w.mu.Lock()
	err = w.stopDaemon(false)
	if err == nil {
		err = w.startDaemon("--keep-sockets")
	}
	w.mu.Unlock()
	if err != nil {
		t.Error(err)
		return
	}
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		t.Errorf("not registered after a restart:\n  %s", why)
		return
	}
	freshDescriptors, freshGoroutines, freshOpen, err := w.atRest()
	if err != nil {
		t.Error(err)
		return
	}
	t.Logf("descriptors %d, of a fresh daemon %d; goroutines %d, %d", descriptors, freshDescriptors, goroutines, freshGoroutines)
	if descriptors > freshDescriptors+1 {
		t.Errorf("descriptors are leaked: %d, a fresh daemon has %d:\n%v\n%v", descriptors, freshDescriptors, open, freshOpen)
	}
	if goroutines > freshGoroutines+3 {
		t.Errorf("goroutines are leaked: %d, a fresh daemon has %d", goroutines, freshGoroutines)
	}
	w.mu.Lock()
	for name, n := range w.events {
		// Else it was published at once.
		if _, damped := waiting[name]; n != before[name] && !damped {
			w.violated("the kubelet noticed a restart: %d events of %s", n-before[name], name)
		}
	}
	w.mu.Unlock()
	if err := errors.Join(w.measureQuietly(), w.flapUntilDamped()); err != nil {
		t.Error(err)
		return
	}
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		t.Errorf("not registered after the measuring:\n  %s", why)
		return
	}
	if long >= 5*time.Minute { // else it would be the longest part
		for name, until := range maps.Clone(w.damped) {
			if why := w.eventually(time.Until(until)+10*time.Second, func() string { return w.isDamped(name) }); why != "" {
				t.Error(why)
			}
		}
	}

	// Without a descriptor store and without --keep-sockets, nothing is left.
	w.mu.Lock()
	err = w.stopDaemon(false)
	w.noteAll(onPath, "the store is empty, and nothing is kept")
	if err == nil {
		err = w.spawner.manager.Drop()
	}
	if err == nil {
		err = w.startDaemon()
	}
	w.mu.Unlock()
	if err != nil {
		t.Error(err)
		return
	}
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		t.Errorf("not registered without a store:\n  %s", why)
		return
	}
	w.mu.Lock()
	w.noteAll(onPath, "stopped for good")
	err = w.stopDaemon(false)
	left := w.removedByStop()
	w.mu.Unlock()
	if err != nil {
		t.Error(err)
	}
	if left != "" {
		t.Errorf("left after the stop: %s", left)
	}
	// Until every deregistration has been checked.
	if why := w.eventually(2*readWithin, func() string {
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.suspects) > 0 {
			return "deregistrations to be looked at"
		}
		return ""
	}); why != "" {
		t.Error(why)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.byName {
		if why := w.history.churn(name); why != "" {
			w.violated("%s%s", why, w.history.story(name))
		}
	}
}
