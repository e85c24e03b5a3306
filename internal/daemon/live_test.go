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
		for range 300 {
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
	l.answers[""] = &liveAnswer{done: make(chan struct{})} // never closed
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Alive(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled request: %v", err)
	}
	stuck := errors.New("a registrar does not answer")
	answered := make(chan struct{})
	close(answered)
	l.answers[""] = &liveAnswer{done: answered, at: time.Now(), err: stuck}
	if err := b.Alive(t.Context()); !errors.Is(err, stuck) {
		t.Errorf("%v, want the answer to another request", err)
	}
}
