package registrar

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// probing is base with the default of probe_every.
func probing() config.Driver {
	table := base
	table.ProbeEvery = time.Minute
	return table
}

// silent is the report of a driver that accepts connections and answers nothing.
func silent() status.Report {
	return status.Report{Driver: status.Starting, Reason: "did not answer Probe within 5s", Silent: true, Connection: 1}
}

// Drivers that came at different times are probed at the same times.
func TestProbeTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		at := map[time.Time]int{}
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		const drivers = 20
		for range drivers {
			w := registeredWorld()
			w.hints, w.shints = make(chan struct{}, 1), make(chan struct{}, 1)
			w.probe = func() status.Report {
				mu.Lock()
				defer mu.Unlock()
				at[time.Now().Round(0)]++
				return ready()
			}
			r := New(probing(), driver.Observe(w), fakeSocket{w}, slog.New(slog.DiscardHandler), func(status.Driver) {})
			all.Go(func() { r.Run(ctx) })
			time.Sleep(3770 * time.Millisecond)
		}
		begin := time.Now()
		time.Sleep(time.Hour)
		synctest.Wait()
		mu.Lock()
		hour := 0
		for when, n := range at {
			if !when.Equal(when.Truncate(time.Minute)) {
				t.Errorf("%d probes at %s", n, when)
			}
			if when.After(begin) {
				if hour++; n != drivers {
					t.Errorf("%d probes at %s, want those of all drivers", n, when)
				}
			}
		}
		mu.Unlock()
		if hour != 60 {
			t.Errorf("probed at %d times in an hour", hour)
		}
		cancel()
		all.Wait()
	})
}

// Probe is for a driver that is ready: when it is due while the driver is starting, a hint causes
// no call, as NodeGetInfo may be expensive.
func TestNoProbeWhileStarting(t *testing.T) {
	runHarness(t, readyWorld(), probing(), func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Starting, Reason: "not ready", Connection: 1}
		})
		synctest.Wait()
		probes := h.w.probes
		for range 180 {
			poke(h.w.hints)
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if n := h.w.probes - probes; n != 0 {
			t.Errorf("probed %d times", n)
		}
	})
}

// A driver that hangs is noticed after two silences, and asked until it answers; its registration
// stays.
func TestHanging(t *testing.T) {
	w := readyWorld()
	runHarness(t, w, probing(), func(h *harness) {
		h.state("registered")
		time.Sleep(10 * time.Minute)
		asks, _, _ := h.counts()
		if asks != 1 || w.probes < 9 {
			t.Errorf("%d asks, %d probes in 10 minutes", asks, w.probes)
		}
		h.w.mu.Lock()
		h.w.report, h.w.takes = silent(), 5*time.Second // without a hint
		h.w.mu.Unlock()
		began := time.Now()
		for h.status().Driver == status.Ready {
			time.Sleep(time.Second)
		}
		if took := time.Since(began); took > 80*time.Second {
			t.Errorf("noticed after %s", took)
		}
		s := h.status()
		if s.State != "registered" || s.Driver != status.Hanging || !s.Down() || time.Since(s.DriverSince) > time.Second || !strings.Contains(s.Reason, "did not answer") {
			t.Errorf("status %+v", s)
		}
		before, _, _ := h.counts()
		time.Sleep(80 * time.Second)
		if after, _, _ := h.counts(); after-before < 9 || after-before > 11 {
			t.Errorf("asked %d times in 80 s, want each 3 s after the end of the last call", after-before)
		}
		if since := h.status().DriverSince; !since.Equal(s.DriverSince) {
			t.Errorf("hanging since %s, was since %s", since, s.DriverSince)
		}
		h.w.mu.Lock()
		h.w.report, h.w.takes = ready(), 0
		h.w.mu.Unlock()
		back := time.Now()
		for h.status().Driver != status.Ready {
			time.Sleep(100 * time.Millisecond)
		}
		if took := time.Since(back); took > 8*time.Second { // a call that is silent, and the pause
			t.Errorf("back after %s", took)
		}
		if s := h.status(); s.Reason != "" || s.DriverRestarts != 0 || len(s.Restarts) != 0 {
			t.Errorf("status %+v", s)
		}
		time.Sleep(time.Hour)
		h.publications(1)
		if _, _, n := h.counts(); n != 0 {
			t.Errorf("withdrawn %d times", n)
		}
		said := h.log.said() // how many lines the start has depends on the scheduler
		hung := slices.IndexFunc(said, func(line string) bool { return strings.HasPrefix(line, "driver does not answer: ") })
		if hung < 0 || len(said) != hung+2 || said[hung+1] != "driver is ready again" {
			t.Errorf("log %q", said)
		}
	})
}

// One silence is no hang.
func TestHangingNeedsTwoSilences(t *testing.T) {
	w := readyWorld()
	runHarness(t, w, probing(), func(h *harness) {
		h.state("registered")
		said := h.log.len()
		h.w.mu.Lock()
		h.w.probe = func() status.Report { return silent() } // Ask is answered
		h.w.mu.Unlock()
		for range 600 {
			time.Sleep(time.Second)
			if s := h.status(); s.Driver != status.Ready {
				t.Fatalf("status %+v", s)
			}
		}
		if asks, _, _ := h.counts(); asks != 1+w.probes || w.probes < 9 {
			t.Errorf("%d probes were silent and %d asks followed", w.probes, asks-1)
		}
		if h.log.len() != said {
			t.Errorf("log %q", h.log.said()[said:])
		}
	})
}

// Without probes a hang is noticed when the driver is asked for another reason.
func TestHangingWithoutProbes(t *testing.T) {
	w := readyWorld()
	runHarness(t, w, base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) { w.report, w.takes = silent(), 5*time.Second })
		time.Sleep(11 * time.Second)
		if s := h.status(); s.Driver != status.Hanging || s.State != "registered" {
			t.Errorf("status %+v", s)
		}
		h.w.set(func(w *world) { w.report, w.takes = ready(), 0 })
		time.Sleep(8 * time.Second)
		if s := h.status(); s.Driver != status.Ready || w.probes != 0 {
			t.Errorf("%d probes, status %+v", w.probes, s)
		}
	})
}

// Before it is published, a silent driver is only not ready.
func TestHangingOnlyWhenPublished(t *testing.T) {
	w := newWorld()
	w.report, w.takes = silent(), 5*time.Second
	runHarness(t, w, probing(), func(h *harness) {
		time.Sleep(10 * time.Minute)
		h.state("starting")
	})
}

// NodeGetInfo may be a request to a cloud that is overloaded.
func TestBackoffOfADriverThatIsNotReady(t *testing.T) {
	failing := status.Report{Driver: status.Starting, Reason: "NodeGetInfo: Internal", Connection: 1}
	for _, c := range []struct{ outage, within time.Duration }{
		{time.Second, 1500 * time.Millisecond}, {9900 * time.Millisecond, 1500 * time.Millisecond},
		{30 * time.Second, 33 * time.Second}, {time.Hour, 33 * time.Second},
	} {
		w := newWorld()
		w.report = failing
		runHarness(t, w, base, func(h *harness) {
			time.Sleep(c.outage)
			asks, _, _ := h.counts()
			if asks > 150 || c.outage == time.Hour && asks < 100 {
				t.Errorf("%d asks in %s", asks, c.outage)
			}
			h.w.mu.Lock()
			h.w.report = ready()
			h.w.mu.Unlock()
			time.Sleep(c.within)
			h.state("registered")
		})
	}
}

// A hint about the same socket and connection does not change what a driver that is not ready
// would answer.
func TestBackoffWithHints(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "NodeGetInfo: Internal", Connection: 1}
	runHarness(t, w, base, func(h *harness) {
		for range 3600 {
			time.Sleep(time.Second)
			poke(h.w.hints)
		}
		if asks, _, _ := h.counts(); asks > 150 {
			t.Errorf("%d asks in an hour", asks)
		}
		h.w.set(func(w *world) { w.report.Connection = 2 })
		time.Sleep(100 * time.Millisecond)
		before, _, _ := h.counts()
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(1500 * time.Millisecond)
		h.state("registered")
		if before == 0 {
			t.Error("a new connection was not asked")
		}
	})
}

// A new connection, which a driver that restarts has, begins again with short pauses.
func TestBackoffEndsWithANewConnection(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "NodeGetInfo: Internal", Connection: 1}
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(10 * time.Minute)
		before, _, _ := h.counts()
		h.w.set(func(w *world) { w.report.Connection = 2 })
		time.Sleep(10 * time.Second)
		if after, _, _ := h.counts(); after-before < 20 || after-before > 25 {
			t.Errorf("%d asks in 10 s after a new connection", after-before)
		}
		time.Sleep(time.Hour)
		// Silence makes new connections, which are no news.
		h.w.mu.Lock()
		h.w.report.Silent = true
		h.w.mu.Unlock()
		time.Sleep(time.Minute)
		before, _, _ = h.counts()
		for range 60 {
			h.w.mu.Lock()
			h.w.report.Connection++
			h.w.mu.Unlock()
			time.Sleep(time.Minute)
		}
		if after, _, _ := h.counts(); after-before > 150 {
			t.Errorf("%d asks in an hour of silence", after-before)
		}
	})
}

// A look at the socket is no load for the driver.
func TestBackoffOfALookThatFails(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "no permission to look"}
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(time.Hour)
		if asks, _, _ := h.counts(); asks < 3000 {
			t.Errorf("%d looks in an hour", asks)
		}
	})
}

func TestRestartCount(t *testing.T) {
	absent := status.Report{Driver: status.Absent, Reason: "gone"}
	starting := status.Report{Driver: status.Starting, Reason: "the connection broke"}
	replaced := ready()
	replaced.Replaced = true
	w := newWorld()
	runHarness(t, w, base, func(h *harness) {
		count := func(what string, want uint64, reports ...status.Report) {
			t.Helper()
			for _, rep := range reports {
				time.Sleep(time.Second)
				h.w.set(func(w *world) { w.report = rep })
				synctest.Wait()
			}
			if s := h.status(); s.RestartsTotal != want || uint64(len(s.Restarts)) != want {
				t.Errorf("%s: %d restarts, %d of them recent, want %d", what, s.RestartsTotal, len(s.Restarts), want)
			}
		}
		count("the first start", 0, absent, starting, ready())
		count("a restart", 1, absent, ready())
		count("a slow restart", 2, absent, starting, starting, replaced)
		count("a restart that nobody noticed", 3, replaced)
		count("not ready for a while", 3, starting, ready())
		count("a crash before it is ready", 5, absent, starting, absent, starting, absent)
		if s := h.status(); !s.Down() || time.Since(s.DriverSince) > time.Second {
			t.Errorf("status %+v", s)
		}
	})
}

// With when_limit_changes = "leave" the kubelet asks the driver itself: the status has both
// numbers.
func TestVolumeLimitLeftToTheKubelet(t *testing.T) {
	w := readyWorld()
	table := base
	table.WhenLimitChanges = config.Leave
	runHarness(t, w, table, func(h *harness) {
		h.state("registered")
		if s := h.status(); s.KubeletMaxVolumes != nil {
			t.Errorf("status %+v", s)
		}
		for i := range 20 { // restarts with volumes attached
			h.w.set(func(w *world) {
				w.report = ready()
				w.report.Replaced, w.report.Identity.MaxVolumes = true, int64(7-i%3)
			})
			time.Sleep(time.Minute)
		}
		h.publications(1)
		if s := h.status(); s.State != "registered" || s.Reason != "" || s.MaxVolumes != 6 || s.KubeletMaxVolumes == nil || *s.KubeletMaxVolumes != 8 {
			t.Errorf("status %+v", s)
		}
		// With another topology key the kubelet cannot update the limit either.
		h.w.set(func(w *world) { w.report.Identity.Topology = map[string]string{"zone": "a", "rack": "b"} })
		h.publications(2)
		if s := h.status(); s.KubeletMaxVolumes != nil {
			t.Errorf("status %+v", s)
		}
	})
}

// The kubelet's restart registers again, and so it knows the limit.
func TestVolumeLimitLearnedByTheKubelet(t *testing.T) {
	w := readyWorld()
	table := base
	table.WhenLimitChanges = config.Leave
	runHarness(t, w, table, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) { w.report.Identity.MaxVolumes = 3 })
		time.Sleep(time.Hour)
		h.w.word(true, "")
		if s := h.status(); s.KubeletMaxVolumes != nil || s.MaxVolumes != 3 {
			t.Errorf("status %+v", s)
		}
		h.publications(1)
	})
}
