package registrar

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

func TestAbsentDriverIsRegisteredAtAHint(t *testing.T) {
	runHarness(t, newWorld(), base, func(h *harness) {
		h.state("absent")
		time.Sleep(60 * time.Minute)
		start := time.Now()
		h.w.set(func(w *world) { w.report = ready() })
		h.state("registered")
		if d := time.Since(start); d != 0 {
			t.Errorf("took %s of virtual time: something waited for a timer", d)
		}
		if s := h.status(); s.NodeID != "n1" || s.RegisteredAt.IsZero() || s.Reason != "" {
			t.Errorf("status %+v", s)
		}
		h.publications(1)
	})
}

func TestAbsentDriverIsFoundWithoutHints(t *testing.T) {
	runHarness(t, newWorld(), base, func(h *harness) {
		time.Sleep(time.Hour)
		h.w.mu.Lock()
		h.w.report = ready()
		asks := h.w.asks
		h.w.mu.Unlock()
		if asks > 150 || asks < 100 {
			t.Errorf("an hour of absence cost %d questions, want about 120", asks)
		}
		time.Sleep(34 * time.Second)
		h.state("registered")
	})
}

func TestLogOfAnAbsentDriver(t *testing.T) {
	runHarness(t, newWorld(), base, func(h *harness) {
		for i := range 24 * 60 {
			time.Sleep(time.Minute)
			h.w.set(func(w *world) { w.report.Reason = fmt.Sprint("reason ", i%7) })
		}
		if n := h.log.len(); n > 30 {
			t.Errorf("%d lines", n)
		}
	})
}

// The first line waits for the first answer: it says why.
func TestLogReasonOfAbsence(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Absent, Reason: "there is nothing"}
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(time.Minute)
		want := []string{"waiting for the driver: there is nothing"}
		if said := h.log.said(); !slices.Equal(said, want) {
			t.Errorf("%q, want %q", said, want)
		}
	})
}

func TestStartingDriverIsAskedAgain(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(10 * time.Second)
		h.state("starting")
		if s := h.status(); s.Reason != "Probe: not ready" {
			t.Errorf("reason %q", s.Reason)
		}
		h.w.mu.Lock()
		asks := h.w.asks
		h.w.report = ready()
		h.w.mu.Unlock()
		if asks < 8 || asks > 13 {
			t.Errorf("asked %d times in 10 s", asks)
		}
		time.Sleep(1200 * time.Millisecond)
		h.state("registered")
	})
}

func TestHintsOfAFlappingDriver(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "closes at once"}
	runHarness(t, w, base, func(h *harness) {
		for range 10000 {
			time.Sleep(time.Millisecond)
			poke(h.w.hints)
		}
		if asks, _, _ := h.counts(); asks > 60 {
			t.Errorf("10,000 hints in 10 s caused %d questions", asks)
		}
	})
}

func TestRestartOfADriver(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		for range 100 {
			h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
			if s := h.status(); s.State != "registered" || s.Driver != status.Absent || !strings.Contains(s.Reason, "kept") {
				t.Fatalf("status %+v", s)
			}
			time.Sleep(time.Second)
			h.w.set(func(w *world) { w.report = ready() })
			synctest.Wait()
		}
		h.publications(1)
		if _, _, n := h.counts(); n != 0 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

func TestIdle(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		before, _, _ := h.counts()
		time.Sleep(24 * time.Hour)
		if after, _, _ := h.counts(); after != before {
			t.Errorf("%d questions in a quiet day", after-before)
		}
		h.publications(1)
	})
}

func TestChanges(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*status.Identity)
		more   int
		reason string
	}{
		{"version alone", func(i *status.Identity) { i.Version = "2" }, 0, ""},
		{"node id", func(i *status.Identity) { i.NodeID = "n2" }, 1, ""},
		{"limit", func(i *status.Identity) { i.MaxVolumes = 9 }, 1, ""},
		{"topology key added", func(i *status.Identity) { i.Topology = map[string]string{"zone": "a", "rack": "b"} }, 1, ""},
		{"topology key gone", func(i *status.Identity) { i.Topology = nil }, 0, ""},
		{"topology value", func(i *status.Identity) { i.Topology = map[string]string{"zone": "b"} }, 0, "remove the label"},
		{"topology value and node id", func(i *status.Identity) { i.Topology = map[string]string{"zone": "b"}; i.NodeID = "n2" }, 0, "remove the label"},
	} {
		t.Run(c.name, func(t *testing.T) {
			runHarness(t, readyWorld(), base, func(h *harness) {
				h.state("registered")
				h.w.set(func(w *world) {
					w.report = ready()
					c.change(&w.report.Identity)
				})
				h.state("registered")
				time.Sleep(time.Hour)
				h.publications(1 + c.more)
				if s := h.status(); !strings.Contains(s.Reason, c.reason) || (c.reason == "") != (s.Reason == "") {
					t.Errorf("reason %q, want %q", s.Reason, c.reason)
				}
				if s := h.status(); (s.RefusedChange == "") != (c.reason == "") || !strings.HasPrefix(s.Reason, s.RefusedChange) {
					t.Errorf("refused change %q, reason %q", s.RefusedChange, s.Reason)
				}
				if s := h.status(); s.Republications != uint64(c.more) {
					t.Errorf("counted %v", s.Republications)
				}
			})
		})
	}
}

// An answer of the kubelet that an earlier process recorded is in the future once the wall clock
// was set back.
func TestWallClockSetBack(t *testing.T) {
	w := readyWorld()
	w.takes = time.Millisecond
	w.report.Identity.NodeID = "n2"
	runHarness(t, w, base, func(h *harness) {
		h.w.set(func(w *world) {
			at := time.Now().Add(time.Hour)
			w.sock.Up, w.sock.Place, w.sock.PublishedAt, w.sock.GetInfoAt = true, status.Ours, at, at
			w.sock.Announced = status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity}
			w.sock.Notification = status.Notification{At: at, Registered: true}
		})
		time.Sleep(time.Minute)
		if asks, published, _ := h.counts(); asks > 5 || published != 1 {
			t.Errorf("asked %d times, published %d times", asks, published)
		}
	})
}

// A request counts although what an earlier process recorded is in the future.
func TestRequestAfterTheWallClockWasSetBack(t *testing.T) {
	for _, registered := range []bool{true, false} {
		w := readyWorld()
		runHarness(t, w, base, func(h *harness) {
			time.Sleep(time.Minute)
			h.w.set(func(w *world) {
				at := time.Now() // as the age of a time in the future is 0
				w.sock.PublishedAt, w.sock.GetInfoAt = at, at
				w.sock.Notification = status.Notification{At: at, Registered: registered, Error: "no"}
			})
			time.Sleep(time.Second)
			var err error
			if registered {
				err = h.reg.Reregister(h.Context(), false)
			} else {
				err = h.reg.Update(h.Context(), base, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Second)
			h.publications(2)
			h.state("registered")
		})
	}
}

func TestChangedEndpointWithMovedTopology(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) {
			w.report = ready()
			w.report.Identity.Topology = map[string]string{"zone": "b"}
		})
		table := base
		table.Endpoint = "/elsewhere/foo.sock"
		if err := h.reg.Update(h.Context(), table, nil); err != nil {
			t.Fatal(err)
		}
		h.publications(2)
		if got := h.w.published[1].Endpoint; got != table.Endpoint {
			t.Errorf("told %q", got)
		}
	})
}

// The kubelet asks the driver itself. An answer that it has accepted is registered again, so that
// the next process knows it, and hides no later change.
func TestChangedTopologyLearnedByTheKubelet(t *testing.T) {
	w := readyWorld()
	runHarness(t, w, base, func(h *harness) {
		h.state("registered")
		moved := func(w *world) { w.report.Identity.Topology = map[string]string{"zone": "b"} }
		h.w.set(moved)
		if s := h.status(); !strings.Contains(s.Reason, "remove the label") {
			t.Fatalf("reason %q", s.Reason)
		}
		time.Sleep(time.Hour)
		h.publications(1)
		h.w.word(true, "") // the label was removed and the kubelet restarted
		time.Sleep(time.Minute)
		h.publications(2)
		if s := h.status(); s.State != "registered" || s.Reason != "" || s.RefusedChange != "" {
			t.Errorf("status %+v", s)
		}
		h.w.set(func(w *world) { w.report.Identity.NodeID = "n2" })
		h.publications(3)
		time.Sleep(time.Hour)
		h.publications(3)
	})
}

func TestLimitOfChangedNodeIDs(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range 3600 {
			h.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("n", i) })
			time.Sleep(time.Second)
		}
		if _, n, _ := h.counts(); n > alterMost+1 {
			t.Errorf("published %d times in an hour", n)
		}
	})
}

func TestMismatchIsWithdrawn(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Mismatch, Reason: "calls itself bar"}
		})
		h.state("mismatch")
		if _, _, n := h.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
		h.w.set(func(w *world) { w.report = ready() })
		h.state("registered")
	})
}

// A withdrawal that failed halfway, with the socket removed, does not delay the next publication.
func TestRestoreAfterAFailedWithdrawal(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) {
			w.withdrawErr = errors.New("the record cannot be removed")
			w.report = status.Report{Driver: status.Mismatch, Reason: "calls itself bar"}
			w.sock.Place = status.Missing
		})
		time.Sleep(10 * time.Minute) // it is tried each minute
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Second)
		h.state("registered")
		h.publications(2)
	})
}

func TestWithdrawAfter(t *testing.T) {
	w := readyWorld()
	table := base
	table.WhenGone, table.WithdrawAfter = config.Withdraw, 30*time.Second
	runHarness(t, w, table, func(h *harness) {
		gone := func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} }
		h.w.set(gone)
		time.Sleep(29 * time.Second)
		h.state("registered")
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(29 * time.Second)
		h.state("registered")
		h.w.set(gone)
		h.state("registered")
		time.Sleep(30*time.Second + time.Millisecond)
		h.state("absent")
		if _, _, n := h.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

// A driver that answers is not gone, ready or not.
func TestWithdrawAfterCountsAbsenceAlone(t *testing.T) {
	w := readyWorld()
	table := base
	table.WhenGone, table.WithdrawAfter = config.Withdraw, 30*time.Second
	runHarness(t, w, table, func(h *harness) {
		h.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
		})
		time.Sleep(5 * time.Minute)
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(29 * time.Second)
		h.state("registered")
		time.Sleep(time.Second + time.Millisecond)
		h.state("absent")
	})
}

// A driver is gone when it says so, not while nobody knows: a daemon that was restarted has not
// heard of it yet, and one that was stopped for a while may have missed its return.
func TestWithdrawAfterAsksAgain(t *testing.T) {
	table := base
	table.WhenGone, table.WithdrawAfter = config.Withdraw, 10*time.Second
	adopted := status.Socket{
		Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true,
		Publication: status.Publication{
			PublishedAt: time.Now(),
			Announced:   status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity},
			GetInfoAt:   time.Now(), Notification: status.Notification{At: time.Now(), Registered: true},
		},
	}
	t.Run("slow at the start", func(t *testing.T) {
		w := newWorld()
		w.sock, w.hang = adopted, true
		runHarness(t, w, table, func(h *harness) {
			time.Sleep(time.Minute)
			h.state("registered")
		})
	})
	t.Run("back without a hint", func(t *testing.T) {
		w := newWorld()
		w.sock = adopted
		runHarness(t, w, table, func(h *harness) {
			time.Sleep(9 * time.Second)
			w.mu.Lock()
			w.report = ready()
			w.mu.Unlock()
			time.Sleep(2 * time.Second)
			h.state("registered")
			if s := h.status(); s.Driver != status.Ready {
				t.Errorf("the driver is %s", s.Driver)
			}
		})
	})
	back := func(w *world) { // without a hint
		w.mu.Lock()
		w.report, w.checkErr, w.withdrawErr = ready(), nil, nil
		w.mu.Unlock()
	}
	t.Run("back while the file system did not answer", func(t *testing.T) {
		w := newWorld()
		w.sock, w.checkErr = adopted, errFull
		runHarness(t, w, table, func(h *harness) {
			time.Sleep(20 * time.Second)
			h.w.set(func(*world) {}) // asked after withdraw_after
			time.Sleep(time.Second)
			back(w)
			poke(w.shints)
			h.state("registered")
			if _, _, n := h.counts(); n != 0 || h.status().Driver != status.Ready {
				t.Errorf("withdrawn %d times, the driver is %s", n, h.status().Driver)
			}
		})
	})
	t.Run("back while it could not be withdrawn", func(t *testing.T) {
		w := newWorld()
		w.sock, w.withdrawErr = adopted, errFull
		runHarness(t, w, table, func(h *harness) {
			for tries := 0; tries < 5; time.Sleep(100 * time.Millisecond) {
				w.mu.Lock()
				tries = w.withdrawals
				w.mu.Unlock()
			}
			h.w.set(func(*world) {})
			synctest.Wait() // it was asked
			back(w)
			for h.status().Driver != status.Ready {
				time.Sleep(100 * time.Millisecond)
			}
			if _, _, n := h.counts(); n != 0 {
				t.Errorf("withdrawn %d times", n)
			}
			h.state("registered")
		})
	})
	t.Run("gone", func(t *testing.T) {
		w := newWorld()
		w.sock = adopted
		runHarness(t, w, table, func(h *harness) {
			time.Sleep(9 * time.Second)
			h.state("registered")
			time.Sleep(1*time.Second + time.Millisecond)
			h.state("absent")
		})
	})
}

func TestRestoreRemovedOrReplaced(t *testing.T) {
	for _, place := range []status.Place{status.Missing, status.Foreign} {
		t.Run(string(place), func(t *testing.T) {
			runHarness(t, readyWorld(), base, func(h *harness) {
				h.state("registered")
				h.w.set(func(w *world) { w.sock.Place = place })
				h.publications(1) // who removes more is not disturbed
				time.Sleep(quietSocket)
				h.state("registered")
				h.publications(2)
				// Somebody who removes it for ever does not make us publish for ever.
				for range 60_000 {
					h.w.set(func(w *world) { w.sock.Place = place })
					time.Sleep(time.Millisecond)
				}
				if _, n, _ := h.counts(); n > 1+restoreFree+3 {
					t.Errorf("published %d times in a minute", n)
				}
				if s := h.status(); s.DampedUntil.IsZero() || !strings.Contains(s.Reason, "removed or replaced, or refused by the kubelet, 22 times within an hour") {
					t.Errorf("status %+v", s)
				}
				time.Sleep(restoreMost)
				h.state("registered")
			})
		})
	}
}

func TestRestoreWaitsForTheDriver(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		h.state("registered")
		h.w.set(func(w *world) { w.sock.Place = status.Missing })
		time.Sleep(time.Minute)
		h.state("absent")
		h.publications(1)
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(quietSocket)
		h.state("registered")
	})
}

func TestConflict(t *testing.T) {
	w := readyWorld()
	w.publishErr = conflict{}
	runHarness(t, w, base, func(h *harness) {
		h.state("conflict")
		time.Sleep(time.Hour)
		h.state("conflict")
		if n := h.log.len(); n > 5 {
			t.Errorf("%d lines for an hour of conflict", n)
		}
		// The other leaves without a hint.
		h.w.mu.Lock()
		h.w.publishErr = nil
		h.w.mu.Unlock()
		time.Sleep(retryConflictMost + retryConflictMost/8)
		h.state("registered")
	})
}

// The status names the process that serves the driver during a conflict, and at no other time. The
// process is looked for at each hint and every 10 seconds.
func TestConflictNamesWhoServes(t *testing.T) {
	w := readyWorld()
	var asked []time.Time
	w.publishErr = conflict{}
	w.onPublish = func() {
		asked = append(asked, time.Now())
		w.sock.ServedBy = status.ServedBy{PID: 7, AskedAt: time.Now()}
	}
	runHarness(t, w, base, func(h *harness) {
		h.state("conflict")
		time.Sleep(time.Hour)
		h.w.mu.Lock()
		tries := slices.Clone(asked)
		h.w.mu.Unlock()
		for i, at := range tries[1:] {
			if gap := at.Sub(tries[i]); gap > 10500*time.Millisecond {
				t.Errorf("not asked for %s", gap)
			}
		}
		if n := len(tries); n > 400 {
			t.Errorf("asked %d times in an hour", n)
		}
		if s := h.status(); s.ServedBy.PID != 7 || !s.ServedBy.AskedAt.Equal(tries[len(tries)-1]) || s.State != "conflict" {
			t.Errorf("%s, served by %+v", s.State, s.ServedBy)
		}
		poke(h.w.shints)
		time.Sleep(100 * time.Millisecond)
		h.w.mu.Lock()
		more := len(asked) - len(tries)
		h.w.publishErr = nil
		h.w.onPublish = nil
		h.w.mu.Unlock()
		if more != 1 {
			t.Errorf("asked %d times after a hint", more)
		}
		time.Sleep(time.Minute)
		h.w.set(func(w *world) { w.sock.ServedBy.PID = 7 })
		h.state("registered")
		if s := h.status(); s.ServedBy.PID != 0 {
			t.Errorf("registered, and served by %+v", s.ServedBy)
		}
	})
}

// The other registrar is gone, but the path is left free for a moment: that is what the status
// says.
func TestConflictThatEndedIsNotShown(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for range 2 {
			h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Foreign, conflict{} })
			time.Sleep(time.Minute)
			h.state("conflict")
			h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Missing, nil })
			time.Sleep(time.Second)
		}
		h.state("ready")
		if s := h.status(); s.DampedUntil.IsZero() || !strings.Contains(s.Reason, "free for 3s") {
			t.Errorf("until %s: %s", s.DampedUntil, s.Reason)
		}
	})
}

func TestConflictEndsWithItsDriver(t *testing.T) {
	w := readyWorld()
	w.publishErr = conflict{}
	runHarness(t, w, base, func(h *harness) {
		h.state("conflict")
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		h.state("absent")
	})
}

func TestPublishOnAFullDisk(t *testing.T) {
	w := readyWorld()
	w.publishErr = errFull
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(time.Minute)
		h.state("ready")
		if s := h.status(); s.Reason != errFull.Error() {
			t.Errorf("reason %q", s.Reason)
		}
		h.w.mu.Lock()
		h.w.publishErr = nil
		h.w.mu.Unlock()
		time.Sleep(35 * time.Second) // it is tried less and less often
		h.state("registered")
	})
}

// After a failed publication, a publication for another cause is no retry: it is counted.
func TestCountAfterAFailedPublication(t *testing.T) {
	w := readyWorld()
	w.publishErr = errFull
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(time.Minute)
		h.w.set(func(w *world) { // it was adopted late, and tells another endpoint
			a := status.Announcement{Endpoint: "/run/other.sock", Versions: base.SupportedVersions, Identity: w.report.Identity}
			w.publishErr = nil
			w.sock = status.Socket{
				Path: w.sock.Path, Place: status.Ours, Up: true,
				Publication: status.Publication{
					Announced: a, PublishedAt: time.Now().Add(-time.Hour),
					Notification: status.Notification{At: time.Now().Add(-time.Hour), Registered: true},
				},
			}
		})
		time.Sleep(time.Minute)
		if got := h.status().Republications; got != 1 {
			t.Errorf("counted %v", got)
		}
	})
}

// A Check that fails does not make the retry of a publication a new one, which would be counted.
func TestCountNotRetries(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		time.Sleep(time.Minute)
		h.w.set(func(w *world) { w.publishErr, w.sock.Place = errFull, status.Missing })
		for i := range 40 {
			time.Sleep(2 * time.Second)
			h.w.set(func(w *world) {
				if w.checkErr = nil; i%2 == 0 {
					w.checkErr = errors.New("the file system does not answer")
				}
			})
		}
		if got := h.status().Republications; got != 1 {
			t.Errorf("counted %v", got)
		}
	})
}

// If an abandoned call publishes after all, earlier requests are fulfilled.
func TestRequestPublishedLate(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		time.Sleep(time.Minute)
		h.w.set(func(w *world) { w.publishErr = errors.New("the file system does not answer") })
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		h.w.set(func(w *world) {
			w.publishErr = nil
			w.sock.PublishedAt, w.sock.Notification = time.Now(), status.Notification{}
		})
		time.Sleep(time.Minute)
		h.w.mu.Lock()
		defer h.w.mu.Unlock()
		if n := len(h.w.published); n != 1 {
			t.Errorf("published %d times by the registrar, besides the abandoned call", n)
		}
	})
}

// A request ends when its driver is disabled. If the driver is enabled again while its withdrawal
// hangs, the publication after the withdrawal is not the requested one.
func TestRequestEndsWithTheRegistration(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		time.Sleep(time.Minute)
		hung := errors.New("the file system does not answer")
		h.w.set(func(w *world) { w.publishErr, w.withdrawErr = hung, hung })
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // it is tried
		h.w.set(func(w *world) { w.checkErr = hung })
		for _, table := range []config.Driver{disabled, base} {
			if err := h.reg.Update(h.Context(), table, nil); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Second)
		}
		h.w.set(func(w *world) {
			w.publishErr, w.withdrawErr, w.checkErr = nil, nil, nil
			w.sock = status.Socket{Path: w.sock.Path, Place: status.Missing} // withdrawn late
		})
		time.Sleep(time.Minute)
		if got := h.status(); got.Republications != 1 || got.Registration != status.Registered {
			t.Errorf("%s, counted %v", got.Registration, got.Republications)
		}
	})
}

// A call that was abandoned publishes after all: the next change for the same cause is no retry,
// and is counted.
func TestCountPublicationThatCompletedLate(t *testing.T) {
	w := readyWorld()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	runHarness(t, w, base, func(h *harness) {
		h.state("refused")
		hung := errors.New("the file system does not answer")
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.report, w.publishErr = ready(), hung })
		time.Sleep(100 * time.Millisecond)
		h.w.set(func(w *world) { w.checkErr, w.sock.PublishedAt = hung, time.Now() })
		time.Sleep(time.Second)
		h.w.word(false, "no")
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.report.Replaced = true })
		synctest.Wait()
		h.w.set(func(w *world) { w.checkErr, w.publishErr, w.report.Replaced = nil, nil, false })
		time.Sleep(time.Minute)
		h.publications(2) // and the one that was abandoned
		if got := h.status().Republications; got != 2 {
			t.Errorf("counted %v", got)
		}
	})
}

func TestRefusedAndTriedAgainByTheKubelet(t *testing.T) {
	w := readyWorld()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	runHarness(t, w, base, func(h *harness) {
		h.state("refused")
		if s := h.status(); s.KubeletError != "no" {
			t.Errorf("status %+v", s)
		}
		for range 30 { // kubelet v1.36 in its backoff
			time.Sleep(122 * time.Second)
			h.w.word(false, "no")
		}
		h.publications(1)
		h.w.word(true, "")
		h.state("registered")
		h.publications(1)
	})
}

func TestRefusedByAnOlderKubelet(t *testing.T) {
	w := readyWorld()
	refuse := true
	w.accept = func(status.Announcement) (bool, string) { return !refuse, "no" }
	runHarness(t, w, base, func(h *harness) {
		h.state("refused")
		time.Sleep(149 * time.Second)
		h.publications(1)
		time.Sleep(2 * time.Second)
		h.publications(2)
		h.w.set(func(*world) { refuse = false })
		time.Sleep(151 * time.Second)
		h.state("registered")
		h.publications(3)
	})
}

func TestStatusNamesASilentKubelet(t *testing.T) {
	for recreated, want := range map[bool]string{true: "restart the kubelet", false: "it does not run"} {
		w := readyWorld()
		w.accept, w.sock.DirRecreated = nil, recreated
		runHarness(t, w, base, func(h *harness) {
			h.state("published")
			if s := h.status(); s.Reason != "" {
				t.Errorf("complains at once: %q", s.Reason)
			}
			time.Sleep(6 * time.Second)
			if s := h.status(); !strings.Contains(s.Reason, want) {
				t.Errorf("reason %q, want %q", s.Reason, want)
			}
			time.Sleep(time.Hour)
			h.publications(1)
		})
	}
}

func TestRefusedDriverReturns(t *testing.T) {
	w := readyWorld()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	runHarness(t, w, base, func(h *harness) {
		h.state("refused")
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.report = ready() })
		h.publications(2)
		time.Sleep(time.Minute)
		h.publications(2)
	})
}

// A request because of a refusal ends when the kubelet has called again.
func TestRequestSatisfiedByTheKubelet(t *testing.T) {
	w := readyWorld()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	runHarness(t, w, base, func(h *harness) {
		h.state("refused")
		time.Sleep(time.Second)
		h.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
		})
		synctest.Wait()
		table := base
		table.WhenGone, table.WithdrawAfter = config.Withdraw, time.Hour
		if err := h.reg.Update(h.Context(), table, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		h.w.word(true, "") // the kubelet's own retry
		time.Sleep(time.Hour)
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Minute)
		h.state("registered")
		h.publications(1)
	})
}

// A driver's return is news to the refusal that stood then, not to those that come later.
func TestRefusedAfterAnEarlierReturn(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(24 * time.Hour)
		h.w.word(false, "the API server is away")
		time.Sleep(149 * time.Second)
		h.publications(1)
	})
}

// The kubelet's try began before the driver came back, and so did not see it.
func TestRefusedDriverReturnsDuringATry(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.sock.GetInfoAt = time.Now() })
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Second)
		h.w.set(func(w *world) { w.sock.Notification = status.Notification{At: time.Now(), Error: "no such file"} })
		h.state("registered")
		h.publications(2)
	})
}

// An older kubelet refused; the daemon began while the driver was away.
func TestRefusedDriverReturnsAfterTheStart(t *testing.T) {
	w := newWorld()
	runHarness(t, w, base, func(h *harness) {
		h.w.set(func(w *world) {
			w.sock = status.Socket{
				Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true,
				Publication: status.Publication{
					PublishedAt: time.Now(),
					Announced:   status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity},
					GetInfoAt:   time.Now(), Notification: status.Notification{At: time.Now(), Error: "no"},
				},
			}
		})
		time.Sleep(time.Minute)
		h.w.set(func(w *world) { w.report = ready() })
		h.state("registered")
		h.publications(1)
	})
}

// A driver that the kubelet refused is not registered: whatever it does, it is published again 20
// times within an hour at once, and then once a minute. When the kubelet accepts, it is registered.
func TestRefusedDriverThatFlaps(t *testing.T) {
	for name, flap := range map[string]func(*world){
		"closes idle connections": func(w *world) {},
		"crashes and is back":     func(w *world) { w.report.Replaced = true },
		"is not ready for a moment": func(w *world) {
			if w.report = ready(); w.asks%2 == 0 {
				w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
			}
		},
		"answers with something else": func(w *world) { w.report.Identity.MaxVolumes++ },
	} {
		t.Run(name, func(t *testing.T) {
			w := readyWorld()
			w.accept = func(status.Announcement) (bool, string) { return false, "no" }
			runHarness(t, w, base, func(h *harness) {
				at := h.record()
				for range 7190 {
					time.Sleep(500 * time.Millisecond)
					h.w.set(flap)
					synctest.Wait()
				}
				// A change before the refusal counts as a change.
				if n := mostWithin(at()); n < 2 || n > alterMost+restoreFree+3+60 {
					t.Errorf("published %d times within an hour", n)
				}
				h.w.set(func(w *world) {
					w.report = ready()
					w.accept = func(status.Announcement) (bool, string) { return true, "" }
				})
				time.Sleep(time.Second)
				h.w.set(func(w *world) { w.report.Replaced = true })
				h.registeredWithin(restoreMost + time.Second)
			})
		})
	}
}

// A kubelet before 1.36 does not come back after a refusal. However long its API server is away,
// the driver is registered 150 s after it is back.
func TestRefusedForHours(t *testing.T) {
	w := readyWorld()
	w.accept = func(status.Announcement) (bool, string) { return false, "no API server" }
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(3*time.Hour + time.Minute)
		h.state("refused")
		h.w.mu.Lock()
		h.w.accept = func(status.Announcement) (bool, string) { return true, "" }
		h.w.mu.Unlock()
		h.registeredWithin(kubeletRetries + time.Second)
		// The limit of changes is untouched.
		for i := range alterFree {
			h.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("m", i) })
			h.registeredWithin(time.Second)
		}
		if s := h.status(); s.NodeID != fmt.Sprint("m", alterFree-1) {
			t.Errorf("the node id is %q", s.NodeID)
		}
	})
}

// A change that was allowed once is tried again soon, also when it was the last change of the hour.
func TestLimitDoesNotDelayRetries(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range alterMost - 1 {
			h.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("m", i) })
			time.Sleep(alterWait + 10*time.Second)
		}
		h.publications(alterMost)
		h.w.set(func(w *world) { w.report.Identity.NodeID, w.publishErr = "last", conflict{} })
		time.Sleep(alterWait + 10*time.Second)
		h.state("conflict")
		h.w.mu.Lock()
		h.w.publishErr = nil
		h.w.mu.Unlock()
		time.Sleep(retryConflictMost + retryConflictMost/4) // its jitter
		h.state("registered")
		h.publications(alterMost + 1)
	})
}

// A kubelet that restarts says yes again: that is not how long the registration took.
func TestTook(t *testing.T) {
	w := readyWorld()
	w.delay = 700 * time.Millisecond
	runHarness(t, w, base, func(h *harness) {
		time.Sleep(time.Second)
		if s := h.status(); s.Took != 700*time.Millisecond {
			t.Errorf("took %s", s.Took)
		}
		time.Sleep(time.Hour)
		h.w.word(true, "")
		if s := h.status(); s.Took != 700*time.Millisecond {
			t.Errorf("took %s after the kubelet's restart", s.Took)
		}
	})
	// The daemon restarts after that.
	w = newWorld()
	published := time.Date(1999, 12, 31, 0, 0, 0, 0, time.UTC)
	w.sock = status.Socket{
		Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true,
		Publication: status.Publication{
			PublishedAt: published, FirstAcceptedAt: published.Add(700 * time.Millisecond),
			Notification: status.Notification{At: published.Add(24 * time.Hour), Registered: true},
		},
	}
	runHarness(t, w, base, func(h *harness) {
		if s := h.status(); s.Took != 700*time.Millisecond {
			t.Errorf("took %s after the daemon's restart", s.Took)
		}
	})
}

func TestReregister(t *testing.T) {
	w := newWorld()
	runHarness(t, w, base, func(h *harness) {
		if err := h.reg.Reregister(h.Context(), false); err == nil || !strings.Contains(err.Error(), "absent") {
			t.Errorf("of an absent driver: %v", err)
		}
		h.w.set(func(w *world) { w.report = ready() })
		h.state("registered")
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		h.publications(2)
		h.state("registered")
	})
}

// A working registration is not given up for one that the kubelet would refuse, unless somebody
// insists.
func TestReregisterNeedsForce(t *testing.T) {
	w := readyWorld()
	w.report.Identity.Topology, w.report.Identity.NodeID = map[string]string{"zone": "a"}, "n1"
	runHarness(t, w, base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) {
			w.report.Identity.Topology, w.report.Identity.NodeID = map[string]string{"zone": "b"}, "n2"
		})
		synctest.Wait()
		err := h.reg.Reregister(h.Context(), false)
		if err == nil || !strings.Contains(err.Error(), `zone="b" was "a"`) || !strings.Contains(err.Error(), `"n2" was "n1"`) {
			t.Errorf("without force: %v", err)
		}
		time.Sleep(time.Minute)
		h.publications(1)
		if err := h.reg.Reregister(h.Context(), true); err != nil {
			t.Fatal(err)
		}
		h.publications(2)
	})
}

// A driver that hangs for ever holds up neither the repair of the socket, nor commands.
func TestHangingDriverAndCommands(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) { w.hang = true })
		synctest.Wait()
		h.w.set(func(w *world) { w.sock.Place = status.Missing })
		time.Sleep(quietSocket)
		h.publications(2)
		h.state("registered")
		ctx, cancel := context.WithTimeout(h.Context(), time.Second)
		defer cancel()
		if err := h.reg.Alive(ctx); err != nil {
			t.Error(err)
		}
	})
}

func TestUpdateWithANewClient(t *testing.T) {
	w := newWorld()
	runHarness(t, w, base, func(h *harness) {
		h.w.set(func(w *world) { w.hang = true })
		other := newWorld()
		other.report = ready()
		table := base
		table.Socket = "/run/other.sock"
		if err := h.reg.Update(h.Context(), table, driver.Observe(other)); err != nil {
			t.Fatal(err)
		}
		h.state("registered")
		if s := h.status(); string(s.Socket) != table.Socket {
			t.Errorf("status %+v", s)
		}
	})
}

// A typing error in the table of a driver that an earlier process registered does not take it from
// the kubelet. An endpoint that an earlier process announced instead of the table's is replaced.
func TestAdoptedKeepsItsEndpointUntilTheDriverServes(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Absent}
	w.sock = status.Socket{
		Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true, Adopted: true,
		Publication: status.Publication{
			PublishedAt:  time.Now(),
			Announced:    status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity},
			Notification: status.Notification{At: time.Now(), Registered: true},
		},
	}
	runHarness(t, w, base, func(h *harness) {
		table := base
		table.Endpoint = "/elsewhere/foo.sock"
		if err := h.reg.Update(h.Context(), table, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		h.publications(0)
		h.state("registered")
		h.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Minute)
		h.publications(1)
	})
}

func TestAdoptedIsRegisteredAtOnce(t *testing.T) {
	w := newWorld()
	w.hang = true
	id := ready().Identity
	w.sock = status.Socket{
		Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true,
		Publication: status.Publication{
			PublishedAt:  time.Now(),
			Announced:    status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: id},
			Notification: status.Notification{At: time.Now(), Registered: true},
		},
	}
	runHarness(t, w, base, func(h *harness) {
		h.state("registered")
		if s := h.status(); s.NodeID != "n1" {
			t.Errorf("status %+v", s)
		}
		h.publications(0)
	})
}

// A reason that reads differently each time is still no flood in the log.
func TestLogOfAChangingReason(t *testing.T) {
	w := readyWorld()
	w.publishErr = errFull
	runHarness(t, w, base, func(h *harness) {
		for i := range 3600 {
			time.Sleep(time.Second)
			h.w.mu.Lock()
			h.w.publishErr = fmt.Errorf("trouble %d", i)
			h.w.mu.Unlock()
		}
		synctest.Wait()
		if n := h.log.len(); n > 20 {
			t.Errorf("%d lines in an hour", n)
		}
	})
}

// runFailingWithdrawal runs f with a driver that was registered and then disabled, and that cannot
// be withdrawn.
func runFailingWithdrawal(t *testing.T, f func(h *harness)) {
	t.Helper()
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) { w.withdrawErr = errors.New("read-only file system") })
		if err := h.reg.Update(h.Context(), disabled, nil); err != nil {
			t.Fatal(err)
		}
		f(h)
	})
}

// A withdrawal that fails, as in a directory that is read-only for the sandbox, is retried less
// and less often, and is a few lines in the log. The status says so.
func TestFailingWithdrawalIsRetried(t *testing.T) {
	runFailingWithdrawal(t, func(h *harness) {
		began := time.Now()
		for range 3600 { // a busy directory
			time.Sleep(time.Second)
			poke(h.w.shints)
		}
		h.w.mu.Lock()
		tries := h.w.withdrawals
		h.w.mu.Unlock()
		if tries < 30 || tries > 75 {
			t.Errorf("tried %d times in an hour", tries)
		}
		if said := h.log.said(); len(said) > 15 {
			t.Errorf("%d lines in an hour: %q", len(said), said)
		}
		s := h.status()
		if s.WithdrawalError != "read-only file system" || !s.WithdrawalFailedAt.Equal(began) || s.Reason != s.WithdrawalError {
			t.Errorf("status %+v", s)
		}
		h.w.set(func(w *world) { w.withdrawErr = nil })
		time.Sleep(retryWithdrawalMost * 5 / 4)
		if s := h.status(); s.WithdrawalError != "" || !s.WithdrawalFailedAt.IsZero() {
			t.Errorf("status %+v", s)
		}
		if _, _, n := h.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

// A change of the settings ends the pause, and a driver that is enabled again stays registered.
func TestFailingWithdrawalAndUpdate(t *testing.T) {
	runFailingWithdrawal(t, func(h *harness) {
		time.Sleep(30 * time.Minute)
		if err := h.reg.Update(h.Context(), disabled, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Minute)
		if err := h.reg.Update(h.Context(), base, nil); err != nil {
			t.Fatal(err)
		}
		if s := h.status(); s.State != "registered" || s.WithdrawalError != "" || s.Reason != "" {
			t.Errorf("status %+v", s)
		}
		time.Sleep(time.Minute)
		h.state("registered")
		h.publications(1)
		h.w.set(func(w *world) { w.withdrawErr = nil })
		if err := h.reg.Update(h.Context(), disabled, nil); err != nil {
			t.Fatal(err)
		}
		if _, _, n := h.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

// A registration that is about to be withdrawn must not be called kept.
func TestReasonOfAWithdrawal(t *testing.T) {
	seen := status.Socket{
		Up: true, Place: status.Ours,
		Publication: status.Publication{
			Notification: status.Notification{At: time.Now(), Registered: true},
		},
	}
	for what, change := range map[string]func(*Registrar){
		"mismatch": func(r *Registrar) { r.view.Driver = status.Mismatch },
		"leaving":  func(r *Registrar) { r.view.Driver, r.table.Enabled = status.Starting, false },
	} {
		r := &Registrar{}
		r.view.Reason = "it has another name"
		change(r)
		s := &status.Driver{Registration: status.Registered, Driver: r.view.Driver}
		if reason := r.reason(seen, s, time.Now()); !strings.Contains(reason, "is withdrawn: it has another name") || strings.Contains(reason, "kept") {
			t.Errorf("%s: %q", what, reason)
		}
	}
}

// A restart of the daemon does not change since when a driver is registered.
func TestAdoptedSinceItsConfirmation(t *testing.T) {
	for name, confirmed := range map[string]bool{"adopted at the start": true, "adopted, not confirmed": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			runHarness(t, w, base, func(h *harness) {
				at := time.Now().Add(-time.Hour)
				h.w.set(func(w *world) { // its record was read a moment after the start
					w.report = ready()
					w.sock = status.Socket{
						Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true,
						Publication: status.Publication{
							PublishedAt: at, GetInfoAt: at,
							Announced: status.Announcement{Endpoint: base.Endpoint, Versions: base.SupportedVersions, Identity: ready().Identity},
						},
					}
					if confirmed {
						w.sock.Notification = status.Notification{At: at, Registered: true}
					}
				})
				time.Sleep(time.Second)
				if s := h.status(); confirmed != s.Since.Equal(at) {
					t.Errorf("%s since %s, confirmed %s", s.State, s.Since, at)
				}
			})
		})
	}
}

// TestSinceARegistrationIsThereAgain checks since when a registration counts whose socket was away
// for a while: the kubelet did not notice.
func TestSinceARegistrationIsThereAgain(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		time.Sleep(time.Minute)
		h.state("registered")
		h.w.set(func(w *world) { w.report, w.sock.Place = status.Report{Driver: status.Absent}, status.Missing })
		h.state("absent")
		time.Sleep(time.Minute)
		h.w.set(func(w *world) { w.sock.Place = status.Ours })
		h.state("registered")
		if s := h.status(); time.Since(s.Since) != 0 || time.Since(s.RegisteredAt) < 2*time.Minute {
			t.Errorf("since %s, registered %s ago", time.Since(s.Since), time.Since(s.RegisteredAt))
		}
	})
}
