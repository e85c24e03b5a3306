package worker

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestDoReturnsTheResult(t *testing.T) {
	p := NewPool()
	got, err := Do(t.Context(), p.Slot("/a", nil), time.Second, func() int { return 7 }, nil)
	if got != 7 || err != nil || len(p.Stuck()) != 0 {
		t.Errorf("%d, %v, %v", got, err, p.Stuck())
	}
}

// Run returns the error of the call, or why there is none.
func TestRunReturnsOneError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, fail, back := NewPool(), errors.New("failed"), make(chan struct{})
		s := p.Slot("/a", nil)
		if err := Run(t.Context(), s, time.Second, func() error { return fail }); err != fail {
			t.Errorf("%v, want the call's error", err)
		}
		if err := Run(t.Context(), s, time.Second, func() error { return nil }); err != nil {
			t.Error(err)
		}
		err := Run(t.Context(), s, time.Second, func() error { <-back; return fail })
		if _, ok := errors.AsType[*NotAnswering](err); !ok {
			t.Errorf("%v, want that the path does not answer", err)
		}
		close(back)
	})
}

// A call that never returns costs its caller the limit, later callers for the same path no time,
// and one goroutine. When it returns, all that were refused are notified.
func TestACallThatHangsIsAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool()
		back := make(chan struct{})
		told := map[string]int{}
		a := p.Slot("/a", func() { told["a"]++ })
		b := p.Slot("/a", func() { told["b"]++ })
		other := p.Slot("/other", func() { told["other"]++ })
		begun := time.Now()
		var discarded int
		hang := func() int { <-back; return 1 }
		_, err := Do(t.Context(), a, time.Second, hang, func(n int) { discarded += n })
		if _, ok := errors.AsType[*NotAnswering](err); !ok || time.Since(begun) != time.Second {
			t.Errorf("%v after %s", err, time.Since(begun))
		}
		for _, s := range []*Slot{a, b, b} {
			if _, err := Do(t.Context(), s, time.Second, hang, nil); err == nil || time.Since(begun) != time.Second {
				t.Errorf("%v after %s", err, time.Since(begun))
			}
		}
		if _, err := Do(t.Context(), other, time.Second, func() int { return 1 }, nil); err != nil {
			t.Error(err)
		}
		if stuck := p.Stuck(); len(stuck) != 1 || stuck[0] != (Stuck{Path: "/a", Since: begun}) {
			t.Errorf("%v", stuck)
		}
		close(back)
		synctest.Wait()
		if told["a"] != 1 || told["b"] != 1 || told["other"] != 0 || discarded != 1 || len(p.Stuck()) != 0 {
			t.Errorf("told %v, discarded %d, stuck %v", told, discarded, p.Stuck())
		}
		if got, err := Do(t.Context(), b, time.Second, func() int { return 2 }, nil); got != 2 || err != nil {
			t.Errorf("%d, %v", got, err)
		}
	})
}

// Calls about one path run one after the other. A waiting caller is not notified of a call that
// returned in time.
func TestCallsAboutOnePathTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool()
		running, most := 0, 0
		call := func() int {
			running++
			most = max(most, running)
			time.Sleep(100 * time.Millisecond)
			running--
			return 0
		}
		errs := make(chan error)
		for range 3 {
			go func() {
				_, err := Do(t.Context(), p.Slot("/a", func() { t.Error("told") }), time.Second, call, nil)
				errs <- err
			}()
		}
		for range 3 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if most != 1 {
			t.Errorf("%d at a time", most)
		}
	})
}

func TestDoEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool()
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("stopped")
		time.AfterFunc(time.Millisecond, func() { cancel(why) })
		back := make(chan struct{})
		if _, err := Do(ctx, p.Slot("/a", nil), time.Hour, func() int { <-back; return 0 }, nil); !errors.Is(err, why) {
			t.Error(err)
		}
		close(back)
	})
}

// A caller whose time was over before the call ahead returned in time is notified as well.
func TestWhoDidNotGetATurnIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool()
		var told atomic.Int32
		go Do(t.Context(), p.Slot("/a", nil), time.Minute, func() int { time.Sleep(10 * time.Second); return 0 }, nil)
		synctest.Wait()
		if _, err := Do(t.Context(), p.Slot("/a", func() { told.Add(1) }), time.Second, func() int { return 0 }, nil); err == nil || told.Load() != 0 {
			t.Errorf("%v, told %d times", err, told.Load())
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if told.Load() != 1 {
			t.Errorf("told %d times", told.Load())
		}
	})
}

// A call that returns at the moment of its limit is either answered or discarded: nothing that it
// opened is lost.
func TestAResultAtTheLimitIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewPool().Slot("/a", nil)
		for range 1000 {
			discarded := 0
			opened := func() int { time.Sleep(time.Second); return 1 }
			got, err := Do(t.Context(), s, time.Second, opened, func(n int) { discarded += n })
			synctest.Wait()
			if got+discarded != 1 || (err == nil) != (got == 1) {
				t.Fatalf("got %d (%v), discarded %d", got, err, discarded)
			}
		}
	})
}

// A call that waits for its turn has the whole limit when it begins.
func TestTheLimitBeginsWithTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool()
		call := func() int { time.Sleep(900 * time.Millisecond); return 0 }
		errs := make(chan error)
		for range 3 {
			go func() {
				_, err := Do(t.Context(), p.Slot("/a", nil), time.Second, call, nil)
				errs <- err
			}()
		}
		for range 3 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	})
}

// A call in a process that gets little CPU time takes many times the limit, and does not hang.
func TestACallWithoutCPUDoesNotHang(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var busy sync.WaitGroup
	var end atomic.Bool
	for range 10 { // each has the CPU for 10 ms, until the runtime preempts it
		busy.Go(func() {
			for !end.Load() {
			}
		})
	}
	const limit = 50 * time.Millisecond
	begun := time.Now()
	_, err := Do(t.Context(), NewPool().Slot("/a", nil), limit, func() int {
		for range 10 {
			runtime.Gosched()
		}
		return 0
	}, nil)
	took := time.Since(begun)
	end.Store(true)
	busy.Wait()
	if err != nil || took < 2*limit {
		t.Errorf("%v after %s", err, took)
	}
}
