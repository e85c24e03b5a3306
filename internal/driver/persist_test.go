package driver

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestPersist(t *testing.T) {
	broken := errors.New("broken")
	type call func(ctx context.Context, n int) (int, error) // n: the how manieth
	after := func(d time.Duration, ctx context.Context, v int, err error) (int, error) {
		select {
		case <-time.After(d):
			return v, err
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	for _, test := range []struct {
		name  string
		limit time.Duration
		call  call
		value int
		err   error
		took  time.Duration
		calls int
	}{
		{"at once", 5 * time.Second, func(_ context.Context, n int) (int, error) { return n, nil }, 1, nil, 0, 1},
		{"fails at once", 5 * time.Second, func(context.Context, int) (int, error) { return 0, broken }, 0, broken, 0, 1},
		{"never", 5500 * time.Millisecond, func(ctx context.Context, _ int) (int, error) { return after(time.Hour, ctx, 0, nil) },
			0, context.DeadlineExceeded, 5500 * time.Millisecond, 6},
		{"only slow", 5 * time.Second, func(ctx context.Context, n int) (int, error) { return after(3500*time.Millisecond, ctx, n, nil) },
			1, nil, 3500 * time.Millisecond, 4},
		{"the first is lost", 10 * time.Second, func(ctx context.Context, n int) (int, error) {
			if n < 4 { // it recovers after 2.5 s
				return after(time.Hour, ctx, 0, nil)
			}
			return n, nil
		}, 4, nil, 3 * time.Second, 4},
		{"a later one fails", 10 * time.Second, func(ctx context.Context, n int) (int, error) {
			if n == 1 {
				return after(time.Hour, ctx, 0, nil)
			}
			return 0, broken
		}, 0, broken, time.Second, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // which also fails if a call is left behind
				var (
					mu                   sync.Mutex
					calls, running, most int
				)
				begun := time.Now()
				v, err := persist(t.Context(), test.limit, func(ctx context.Context) (int, error) {
					mu.Lock()
					calls, running = calls+1, running+1
					n := calls
					most = max(most, running)
					mu.Unlock()
					defer func() {
						mu.Lock()
						running--
						mu.Unlock()
					}()
					return test.call(ctx, n)
				})
				if v != test.value || !errors.Is(err, test.err) || time.Since(begun) != test.took || calls != test.calls {
					t.Errorf("%d, %v after %v and %d calls; want %d, %v after %v and %d", v, err, time.Since(begun), calls, test.value, test.err, test.took, test.calls)
				}
				if running != 0 || most > 3 {
					t.Errorf("%d calls still run, at most %d did", running, most)
				}
			})
		})
	}
	t.Run("interrupted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(1500*time.Millisecond, cancel)
			begun := time.Now()
			_, err := persist(ctx, time.Minute, func(ctx context.Context) (int, error) { return after(time.Hour, ctx, 0, nil) })
			if !errors.Is(err, context.Canceled) || time.Since(begun) != 1500*time.Millisecond {
				t.Errorf("%v after %v", err, time.Since(begun))
			}
		})
	})
}
