package worker

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A call that waited for its turn does not begin when its context has ended: it would be abandoned
// at once, and the path would count as one that does not answer.
func TestNothingBeginsAfterItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, hints := NewPool(), 0
		s := p.Slot("/path", func() { hints++ })
		p.calls["/path"] = &call{
			done: make(chan struct{}), abandoned: make(chan struct{}), notify: map[*Slot]struct{}{},
		}
		ctx, cancel := context.WithCancel(t.Context())
		ran, result := false, make(chan error, 1)
		go func() {
			_, err := Do(ctx, s, time.Minute, func() int { ran = true; return 0 }, nil)
			result <- err
		}()
		synctest.Wait()
		p.mu.Lock() // the other call returns when the context ends
		delete(p.calls, "/path")
		cancel()
		p.mu.Unlock()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Errorf("error is %v", err)
		}
		synctest.Wait()
		if ran || hints != 1 || len(p.Stuck()) > 0 {
			t.Errorf("ran %t, %d hints, stuck %v", ran, hints, p.Stuck())
		}
	})
}
