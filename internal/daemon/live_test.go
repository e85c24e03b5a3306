package daemon

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// liveTester asks a liveness whose driver takes a while to answer Probe.
type liveTester struct {
	*liveness
	probes  atomic.Int32
	running sync.WaitGroup
	takes   time.Duration
	err     error
}

func newLiveTester(t *testing.T, takes time.Duration) *liveTester {
	l := &liveTester{takes: takes}
	l.liveness = newLiveness(t.Context(), l.running.Go)
	return l
}

func (l *liveTester) askOnce(ctx context.Context) error {
	return l.ask(ctx, "a.example", func(context.Context) error {
		l.probes.Add(1)
		time.Sleep(l.takes)
		return l.err
	})
}

func TestLiveSharesOneProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLiveTester(t, 2*time.Second)
		l.err = errors.New("dead")
		var all sync.WaitGroup
		for range maxLiveWaiting {
			all.Go(func() {
				if err := l.askOnce(t.Context()); !errors.Is(err, l.err) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		time.Sleep(liveFor - time.Nanosecond)
		if err := l.askOnce(t.Context()); !errors.Is(err, l.err) || l.probes.Load() != 1 {
			t.Errorf("%v, %d Probes, want the answer of the first", err, l.probes.Load())
		}
		l.err = nil
		time.Sleep(time.Nanosecond)
		if err := l.askOnce(t.Context()); err != nil || l.probes.Load() != 2 {
			t.Errorf("%v, %d Probes, want another one after %s", err, l.probes.Load(), liveFor)
		}
	})
}

func TestLiveRepeatsTheLastAnswerWhenTooManyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLiveTester(t, 0)
		if err := l.askOnce(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		l.takes = 3 * time.Second
		var all sync.WaitGroup
		for range maxLiveWaiting {
			all.Go(func() { _ = l.askOnce(t.Context()) })
		}
		synctest.Wait()
		begun := time.Now()
		if err := l.askOnce(t.Context()); err != nil || time.Since(begun) != 0 {
			t.Errorf("%v after %s, want the answer of a minute ago at once", err, time.Since(begun))
		}
		all.Wait()
	})
}

// TestLiveAnswersOthersWhenOneGivesUp: who asked first may hang up.
func TestLiveAnswersOthersWhenOneGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLiveTester(t, 2*time.Second)
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var all sync.WaitGroup
		all.Go(func() {
			if err := l.askOnce(impatient); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		synctest.Wait()
		if err := l.askOnce(t.Context()); err != nil || l.probes.Load() != 1 {
			t.Errorf("%v, %d Probes", err, l.probes.Load())
		}
		all.Wait()
	})
}

// The daemon's own liveness is shared, too, and a request that is canceled does not wait for a
// stuck agent.
func TestAliveIsShared(t *testing.T) {
	l := newLiveTester(t, 0)
	b := backend{d: &daemon{live: l.liveness}}
	l.answers[""] = &liveAnswer{running: make(chan struct{})} // never closed
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Alive(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled request: %v", err)
	}
	stuck := errors.New("a registrar does not answer")
	l.answers[""] = &liveAnswer{at: time.Now(), err: stuck}
	if err := b.Alive(t.Context()); !errors.Is(err, stuck) {
		t.Errorf("%v, want the answer to another request", err)
	}
}

// TestLiveHasTheLastAnswerOfASlowDriver checks that a request that ends while the driver is asked
// gets the answer before, if there was one.
func TestLiveHasTheLastAnswerOfASlowDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var probes sync.WaitGroup
		l := newLiveness(t.Context(), probes.Go)
		slow := func(context.Context) error { time.Sleep(time.Minute); return nil }
		limited := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return l.ask(ctx, "a", slow)
		}
		if err := limited(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without an answer: %v", err)
		}
		probes.Wait()
		time.Sleep(2 * liveFor)
		if err := limited(); err != nil {
			t.Errorf("with an older one: %v", err)
		}
		probes.Wait()
	})
}
