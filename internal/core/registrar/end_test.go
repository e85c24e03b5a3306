package registrar

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// runAlone runs a registrar in a bubble until end is called, or it ends by itself.
func runAlone(t *testing.T, w *world, table config.Driver, s Socket) (end context.CancelFunc, ended *sync.WaitGroup) {
	w.hints, w.shints = make(chan struct{}, 1), make(chan struct{}, 1)
	r := New(table, driver.Observe(w), s, slog.New(slog.DiscardHandler), func(status.Driver) {})
	ctx, end := context.WithCancel(t.Context())
	ended = &sync.WaitGroup{}
	ended.Go(func() { r.Run(ctx) })
	return end, ended
}

// TestEndWaitsForAPublication checks that the socket is not closed while it is published.
func TestEndWaitsForAPublication(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := readyWorld()
		w.hold = make(chan struct{})
		end, ended := runAlone(t, w, base, fakeSocket{w})
		synctest.Wait()
		end()
		time.AfterFunc(time.Second, func() { close(w.hold) })
		if ended.Wait(); len(w.published) != 1 {
			t.Error("ended before the publication")
		}
		time.Sleep(time.Hour) // the fake kubelet's timers
	})
}

// lateSocket is adopted by the first Check.
type lateSocket struct{ fakeSocket }

func (s lateSocket) Check(ctx context.Context) error {
	s.w.mu.Lock()
	if s.w.checks == 0 {
		s.w.sock.Up, s.w.sock.Place = true, status.Ours
	}
	s.w.mu.Unlock()
	return s.fakeSocket.Check(ctx)
}

// TestDisabledIsWithdrawnAfterALateAdoption checks that a registrar does not end before it knows
// whether there is a socket.
func TestDisabledIsWithdrawnAfterALateAdoption(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		end, ended := runAlone(t, w, disabled, lateSocket{fakeSocket{w}})
		defer end()
		if ended.Wait(); w.withdrawn != 1 {
			t.Errorf("ended after %d withdrawals", w.withdrawn)
		}
	})
}
