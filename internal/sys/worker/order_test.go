package worker

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestHintComesAfterTheCall checks that the next call is possible at the hint: it is not refused
// because of the call that has returned.
func TestHintComesAfterTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, back, hinted := NewPool(), make(chan struct{}), false
		s := p.Slot("/a", func() {
			hinted = true
			if stuck := p.Stuck(); len(stuck) > 0 {
				t.Errorf("at the hint there is %v", stuck)
			}
		})
		if _, err := Do(t.Context(), s, time.Second, func() int { <-back; return 0 }, nil); err == nil {
			t.Error("it returned")
		}
		close(back)
		synctest.Wait()
		if !hinted {
			t.Error("no hint")
		}
	})
}

// TestStuckAreSorted checks that the calls that hang are listed by path.
func TestStuckAreSorted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, back := NewPool(), make(chan struct{})
		defer close(back)
		for _, path := range []string{"/c", "/a", "/d", "/b"} {
			if err := Run(t.Context(), p.Slot(path, nil), time.Second, func() error { <-back; return nil }); err == nil {
				t.Error("it returned")
			}
		}
		got := ""
		for _, s := range p.Stuck() {
			got += s.Path
		}
		if got != "/a/b/c/d" {
			t.Errorf("%s", got)
		}
	})
}

// TestRunningIsNotStuck checks that a call that still has time is not listed.
func TestRunningIsNotStuck(t *testing.T) {
	p := NewPool()
	stuck, err := Do(t.Context(), p.Slot("/a", nil), time.Minute, p.Stuck, nil)
	if len(stuck) > 0 || err != nil {
		t.Errorf("%v, %v", stuck, err)
	}
}

// TestWaitingEndsWithTheAbandonedCall checks that who waits for another call does not wait longer
// than that call's owner does.
func TestWaitingEndsWithTheAbandonedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, back := NewPool(), make(chan struct{})
		defer close(back)
		go func() { _ = Run(t.Context(), p.Slot("/a", nil), time.Second, func() error { <-back; return nil }) }()
		synctest.Wait()
		begun := time.Now()
		err := Run(t.Context(), p.Slot("/a", nil), time.Hour, func() error { return nil })
		if took := time.Since(begun); err == nil || took > 2*time.Second {
			t.Errorf("%v after %s", err, took)
		}
	})
}
