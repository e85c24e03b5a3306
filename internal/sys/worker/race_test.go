package worker

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestResultAtTheEndOfTheContext checks that of a result that comes while the context ends either
// the caller or discard gets it, whichever goroutine is first.
func TestResultAtTheEndOfTheContext(t *testing.T) {
	p := NewPool()
	const rounds = 2000
	var ran, got atomic.Int64
	for range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		var ended sync.WaitGroup
		ended.Add(1)
		go cancel()
		n, err := Do(ctx, p.Slot("/a", ended.Done), time.Minute, func() int64 { ran.Add(1); <-ctx.Done(); return 1 },
			func(n int64) { got.Add(n) })
		if err == nil {
			got.Add(n)
			continue
		}
		// The Slot is told that the call has returned, which is before discard.
		waited := make(chan struct{})
		go func() { ended.Wait(); close(waited) }()
		select {
		case <-waited:
		case <-time.After(100 * time.Millisecond): // it had returned, or had not begun
		}
	}
	for end := time.Now().Add(10 * time.Second); got.Load() < ran.Load() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if got.Load() != ran.Load() {
		t.Errorf("%d of %d results", got.Load(), ran.Load())
	}
}
