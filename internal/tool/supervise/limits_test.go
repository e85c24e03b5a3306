package supervise

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestProbeTakesAThirdOfTheWatchdog checks the time limit of a Probe and the pause after it.
func TestProbeTakesAThirdOfTheWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var began, took []time.Duration
		start := time.Now()
		s, _, _ := newSupervisor(9 * time.Second)
		s.Live = func(ctx context.Context) error {
			at := time.Now()
			began = append(began, at.Sub(start))
			<-ctx.Done()
			took = append(took, time.Since(at))
			return ctx.Err()
		}
		var watching sync.WaitGroup
		watching.Go(func() { s.Watch(ctx) })
		time.Sleep(8 * time.Second)
		cancel()
		watching.Wait()
		if len(began) != 3 || took[0] != 3*time.Second || took[1] != 3*time.Second || began[1] != 4*time.Second {
			t.Errorf("the Probes began at %v and took %v", began, took)
		}
	})
}

// TestWaitProbesUntilTheDriverIsReady checks that the name alone is not enough, that it is asked
// for once, and how long the pauses are.
func TestWaitProbesUntilTheDriverIsReady(t *testing.T) {
	for name, test := range map[string]struct {
		err   error
		pause time.Duration
	}{"absent": {errAbsent, 20 * time.Millisecond}, "not ready": {errNotReady, 80 * time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, _, _ := newSupervisor(0)
				left, names := 10, 0
				s.Name = func(context.Context) (string, error) { names++; return "a.example", nil }
				s.Live = func(context.Context) error {
					if left--; left >= 0 {
						return test.err
					}
					return nil
				}
				begun := time.Now()
				err := s.Wait(t.Context())
				if took := time.Since(begun); err != nil || names != 1 || took != 10*test.pause {
					t.Errorf("%v after %s and %d calls of GetPluginInfo", err, took, names)
				}
			})
		})
	}
}

// TestAnswerAfterTheEndOfTheDriver checks that a driver whose main process ended does not serve,
// whoever answers.
func TestAnswerAfterTheEndOfTheDriver(t *testing.T) {
	s, _, m := newSupervisor(0)
	ctx, end := context.WithCancelCause(t.Context())
	s.Live = func(context.Context) error { end(ErrEnded); return nil }
	if err := s.Wait(ctx); err != ErrEnded || m.status != "" {
		t.Errorf("%v, status %q", err, m.status)
	}
}

// TestWatchReportsChanges checks that only changes are logged and shown, and no beginning.
func TestWatchReportsChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		s, d, m := newSupervisor(9 * time.Second)
		s.Log = slog.New(slog.NewTextHandler(&log, nil))
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		time.AfterFunc(10*time.Second, func() { d.set(errNotReady, false) })
		time.AfterFunc(20*time.Second, func() { d.set(nil, false) })
		s.Watch(ctx)
		first, second, _ := strings.Cut(log.String(), "\n")
		if m.statuses != 3 || !strings.Contains(first, "the driver does not serve") || !strings.Contains(second, "serves again") ||
			strings.Count(second, "\n") != 1 {
			t.Errorf("%d times shown, logged:\n%s", m.statuses, &log)
		}
	})
}

// TestFailedProbeIsRepeatedInTime checks that with a short WatchdogSec= the next Probe comes after
// a third of it, not after a second.
func TestFailedProbeIsRepeatedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		s, _, _ := newSupervisor(1500 * time.Millisecond)
		s.Live = func(context.Context) error { calls++; return errors.New("not ready") }
		var watching sync.WaitGroup
		watching.Go(func() { s.Watch(ctx) })
		time.Sleep(1250 * time.Millisecond) // at 0, 0.5 and 1 s
		cancel()
		watching.Wait()
		if calls != 3 {
			t.Errorf("%d Probes", calls)
		}
	})
}

// TestEndOfWatchIsNoFailure checks that the Probe that the end of Watch interrupts is not reported.
func TestEndOfWatchIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s, _, m := newSupervisor(9 * time.Second)
		s.Live = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		var watching sync.WaitGroup
		watching.Go(func() { s.Watch(ctx) })
		time.Sleep(time.Second)
		cancel()
		watching.Wait()
		if m.status != "" || !m.lastFed().IsZero() {
			t.Errorf("status %q, fed at %s", m.status, m.lastFed())
		}
	})
}
