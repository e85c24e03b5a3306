package registrar

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/status"
)

// failing runs f with a registrar that has failed to publish for ten minutes, so that its
// next try is half a minute away. tries returns how often it has tried.
func failing(t *testing.T, err error, f func(h *harness, tries func() int)) {
	w := readyWorld()
	w.publishErr = err
	n := 0
	w.onPublish = func() { n++ }
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(10 * time.Minute)
		f(h, func() int { synctest.Wait(); h.w.mu.Lock(); defer h.w.mu.Unlock(); return n })
	})
}

// registeredWithin fails unless the driver is registered in that time.
func (h *harness) registeredWithin(limit time.Duration) {
	h.Helper()
	began := time.Now()
	for h.status().State != "registered" {
		if time.Since(began) > limit {
			h.Fatalf("still %q after %s (%s)", h.status().State, limit, h.status().Reason)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A hint that would let a publication succeed must not be lost when it comes during a try that
// fails, or right after its end.
func TestHintDuringAFailingTry(t *testing.T) {
	for _, c := range []struct {
		name string
		hint func(h *harness)
	}{
		{"of the socket", func(h *harness) { poke(h.w.shints) }},
		{"reregister", func(h *harness) {
			if err := h.reg.Reregister(h.Context(), false); err != nil {
				h.Error(err)
			}
		}},
		{"reload", func(h *harness) {
			if err := h.reg.Update(h.Context(), base, nil); err != nil {
				h.Error(err)
			}
		}},
		{"the driver is ready again", func(h *harness) {
			h.w.set(func(w *world) { w.report = status.Report{Driver: status.Starting, Reason: "restarting", Connection: 2} })
			synctest.Wait()
			h.w.set(func(w *world) { w.report = ready() })
		}},
	} {
		for name, err := range map[string]error{"conflict": conflict{}, "full": errFull} {
			for _, after := range []time.Duration{-10 * time.Millisecond, 0, time.Millisecond, 100 * time.Millisecond} {
				t.Run(c.name+" "+name+" "+after.String(), func(t *testing.T) {
					failing(t, err, func(h *harness, tries func() int) {
						before, hold := tries(), make(chan struct{})
						h.w.mu.Lock()
						h.w.hold = hold
						h.w.mu.Unlock()
						time.Sleep(35 * time.Second) // a try hangs now
						if tries() != before {
							t.Fatal("no try is under way")
						}
						end := func() {
							h.w.mu.Lock()
							h.w.hold = nil
							h.w.mu.Unlock()
							close(hold)
							synctest.Wait()
							h.w.mu.Lock()
							h.w.publishErr = nil
							h.w.mu.Unlock()
						}
						if after < 0 {
							c.hint(h)
							synctest.Wait()
							end()
						} else {
							end()
							time.Sleep(after)
							c.hint(h)
						}
						h.registeredWithin(retryErrorFirst + retryHinted)
					})
				})
			}
		}
	}
}

// After a try the cause can be another one: the pause of the earlier one must not outlast hints.
func TestHintAfterTheCauseChanged(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Foreign, conflict{} })
		time.Sleep(10 * time.Minute)
		h.state(string(status.Conflict))
		hold := make(chan struct{})
		h.w.mu.Lock()
		h.w.hold = hold
		h.w.mu.Unlock()
		time.Sleep(35 * time.Second)
		h.w.set(func(w *world) { w.sock.Place, w.hold = status.Missing, nil })
		close(hold)
		synctest.Wait()
		h.w.set(func(w *world) { w.publishErr = nil })
		h.registeredWithin(2 * time.Second)
	})
}

// A try that fails after it changed the path causes a hint itself.
func TestHintOfTheTryItself(t *testing.T) {
	for name, err := range map[string]error{"conflict": conflict{}, "full": errFull, "other": errors.New("other")} {
		t.Run(name, func(t *testing.T) {
			failing(t, err, func(h *harness, tries func() int) {
				h.w.mu.Lock()
				count := h.w.onPublish
				h.w.onPublish = func() { count(); poke(h.w.shints) }
				h.w.mu.Unlock()
				poke(h.w.shints)
				before := tries()
				time.Sleep(time.Minute)
				if n := tries() - before; n > int(time.Minute/retryConflictFirst)+1 {
					t.Errorf("%d tries in a minute", n)
				}
			})
		})
	}
}

// TestHintOfTheDriver checks that a publication that failed is tried again when the driver has
// answered again, not only after the backoff.
func TestHintOfTheDriver(t *testing.T) {
	w := readyWorld()
	w.publishErr = errFull
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(time.Hour)
		var tries atomic.Int64
		h.w.mu.Lock()
		h.w.onPublish = func() { tries.Add(1) }
		h.w.mu.Unlock()
		for ; tries.Load() == 0; synctest.Wait() {
			time.Sleep(time.Second)
		}
		time.Sleep(2 * time.Second)
		h.w.mu.Lock()
		h.w.publishErr = nil
		h.w.mu.Unlock()
		h.publications(0)
		poke(h.w.hints)
		time.Sleep(2 * retryHinted)
		h.publications(1)
	})
}
