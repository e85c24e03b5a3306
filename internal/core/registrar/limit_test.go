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

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// mostWithin returns the greatest number of publications within an hour.
func mostWithin(at []time.Time) (most int) {
	for i := range at {
		n := 0
		for _, t := range at[i:] {
			if t.Sub(at[i]) < time.Hour {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// record returns a function that returns the times at which the harness has tried to publish since.
func (h *harness) record() func() []time.Time {
	var at []time.Time
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	h.w.onPublish = func() { at = append(at, time.Now()) } // under the same lock
	return func() []time.Time {
		h.w.mu.Lock()
		defer h.w.mu.Unlock()
		return slices.Clone(at)
	}
}

// The status shows that a change is delayed only if it waits for nothing else.
func TestDampedUntil(t *testing.T) {
	now := time.Now()
	damped := func(change func(*task)) bool {
		k := task{pending: action{kind: publish, cause: CauseChanged}, limit: alter, since: now}
		for range alterFree {
			k.made[alter] = append(k.made[alter], now)
		}
		change(&k)
		return !k.dampedUntil(now).IsZero()
	}
	for what, c := range map[string]struct {
		change func(*task)
		want   bool
	}{
		"too many":     {func(*task) {}, true},
		"it is made":   {func(k *task) { k.busy = true }, false},
		"it fails":     {func(k *task) { k.err = errors.New("x") }, false},
		"it is due":    {func(k *task) { k.since = now.Add(-alterWait) }, false},
		"by a command": {func(k *task) { k.pending.cause = CauseAsked }, false},
	} {
		if damped(c.change) != c.want {
			t.Errorf("%s: damped is %t", what, !c.want)
		}
	}
}

// A driver that keeps changing its answers changes its registration at most 12 times in any hour,
// and the last answer is registered within minutes. A registration that is withdrawn again and
// again is published again at most 70 times, and when the driver has been ready for a minute. The
// status shows until when it waits.
func TestLimitOfAFlappingDriver(t *testing.T) {
	other := ready()
	other.Identity.MaxVolumes = 99
	// None is twice alterWait: each change would come at the instant at which the one before it is
	// published, in either order.
	for _, period := range []time.Duration{
		time.Second, 7 * time.Second, time.Minute, 4 * time.Minute, 290 * time.Second, 5 * time.Minute,
		2*alterWait - 10*time.Second, 2*alterWait + 10*time.Second, 9 * time.Minute, 10 * time.Minute,
	} {
		for name, c := range map[string]struct {
			away  status.Report
			share int // of the period, in percent, for which the driver is ready
			most  int
			end   time.Duration
		}{
			"mismatch":              {status.Report{Driver: status.Mismatch, Reason: "another driver"}, 50, 10 + 60, time.Minute},
			"mismatch for a moment": {status.Report{Driver: status.Mismatch, Reason: "another driver"}, 99, 10 + 60, time.Minute},
			"crash loop, withdrawn": {status.Report{Driver: status.Absent, Reason: "gone"}, 50, 10 + 60, time.Minute},
			// and the first one
			"another limit": {other, 50, 12 + 1, 5 * time.Minute},
		} {
			t.Run(fmt.Sprint(name, " each ", period), func(t *testing.T) {
				w := readyWorld()
				table := base
				table.WhenGone, table.WithdrawAfter = config.Withdraw, period/10
				runHarness(t, w, table, func(h *harness) {
					at := h.record()
					up := period * time.Duration(c.share) / 100
					for end := time.Now().Add(3 * time.Hour); time.Now().Before(end); {
						h.w.set(func(w *world) { w.report = ready() })
						time.Sleep(up)
						h.w.set(func(w *world) { w.report = c.away })
						time.Sleep(period - up)
					}
					h.w.set(func(w *world) { w.report = ready() })
					if s := h.status(); s.State != "registered" && s.DampedUntil.IsZero() {
						t.Errorf("no time is shown: %+v", s)
					}
					time.Sleep(c.end + time.Second)
					h.state("registered")
					if n := mostWithin(at()); n > c.most {
						t.Errorf("%d publications within an hour", n)
					}
					h.w.mu.Lock()
					defer h.w.mu.Unlock()
					if got := h.w.sock.Announced.Identity.MaxVolumes; got != ready().Identity.MaxVolumes {
						t.Errorf("the kubelet was told %d", got)
					}
				})
			})
		}
	}
}

// Others can remove or replace the socket as often as they like: it is restored at once 20 times
// within an hour, then with pauses of up to a minute.
func TestLimitOfRestorations(t *testing.T) {
	for _, pause := range []time.Duration{0, 20 * time.Second, 50 * time.Second, 4 * time.Minute} {
		t.Run(pause.String(), func(t *testing.T) {
			runHarness(t, readyWorld(), base, func(h *harness) {
				at := h.record()
				end := time.Now().Add(150 * time.Minute)
				for i := 0; time.Now().Before(end); i++ {
					time.Sleep(pause)
					before, lost := len(at()), time.Now()
					h.w.set(func(w *world) { w.sock.Place = status.Missing })
					for len(at()) == before {
						time.Sleep(quietSocket / 5 * time.Duration(1+time.Since(lost)/time.Second*10))
						if i%2 == 1 { // the cause is another one each time
							h.w.set(func(w *world) {
								if w.sock.Place != status.Ours && time.Since(lost) > 7*time.Second {
									w.sock.Place = map[bool]status.Place{true: status.Foreign, false: status.Missing}[w.sock.Place == status.Missing]
								}
							})
						}
						if s := h.status(); i%2 == 0 && len(at()) == before && time.Since(lost) > 2*quietSocket && (s.DampedUntil.IsZero() || !strings.Contains(s.Reason, "was removed or replaced")) {
							t.Fatalf("nothing says why it waits: %+v", s)
						}
						if time.Since(lost) > 2*restoreMost {
							break
						}
					}
					if took := at()[before].Sub(lost); took > 61*time.Second || i < 20 && took > 2*quietSocket {
						t.Fatalf("number %d took %s", i+1, took)
					}
				}
				if n := mostWithin(at()); n > 20+3+60 {
					t.Errorf("%d publications within an hour", n)
				}
			})
		})
	}
}

// A restoration that fails after it has removed the old socket is still one when it is tried again.
// It counts once, and not as a registration that the daemon withdrew.
func TestLimitOfRestorationsThatFail(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range restoreFree {
			failed := false
			h.w.set(func(w *world) {
				w.sock.Place = status.Missing
				w.onPublish = func() {
					if w.publishErr = nil; !failed {
						w.publishErr, w.sock.Up, failed = errFull, false, true
					}
				}
			})
			h.registeredWithin(retryErrorFirst + 2*quietSocket)
			if s := h.status(); s.Republications != uint64(i+1) {
				t.Fatalf("%d republications after %d removals", s.Republications, i+1)
			}
		}
		h.w.set(func(w *world) { w.sock.Place = status.Missing })
		if until := h.status().DampedUntil; time.Until(until) > restoreFirst || until.IsZero() {
			t.Errorf("number %d waits until %s", restoreFree+1, until)
		}
	})
}

// Beside a sidecar whose pod restarts again and again the path is left to it from the second time
// on, and it counts in no limit: when the sidecar is removed, the driver is published soon.
func TestLimitBesideASidecar(t *testing.T) {
	for _, gap := range []time.Duration{0, 20 * time.Millisecond, time.Second, 2900 * time.Millisecond, 3200 * time.Millisecond, 10 * time.Second} {
		for _, restarts := range []int{1, 2, 20, 40} {
			t.Run(fmt.Sprint(restarts, " restarts, ", gap, " apart"), func(t *testing.T) {
				w := readyWorld()
				w.sock.Place, w.publishErr = status.Foreign, conflict{}
				runHarness(t, w, base, func(h *harness) {
					sidecar := func(runs bool) {
						h.w.set(func(w *world) {
							if w.sock.Place, w.publishErr = status.Missing, nil; runs {
								w.sock.Place, w.publishErr = status.Foreign, conflict{}
							}
						})
					}
					h.state(string(status.Conflict))
					time.Sleep(time.Hour)
					for range restarts {
						sidecar(false)
						time.Sleep(gap)
						sidecar(true)
						time.Sleep(5 * time.Second)
						h.state(string(status.Conflict))
					}
					h.w.mu.Lock()
					published := len(h.w.published)
					h.w.mu.Unlock()
					if most := map[bool]int{true: restarts, false: 1}[gap > 3*time.Second]; published > most {
						t.Errorf("published %d times beside the sidecar", published)
					}
					sidecar(false)
					within := 4 * time.Second
					if published == 0 {
						within = time.Second
					}
					h.registeredWithin(within)
				})
			})
		}
	}
}

// A registrar can end just before the daemon asks it. The daemon then finds the path free, and it
// has to stay free for as long as otherwise.
func TestLimitBesideASidecarThatEndsDuringATry(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range 2 {
			h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Foreign, conflict{} })
			time.Sleep(time.Second)
			h.state(string(status.Conflict))
			h.w.set(func(w *world) { w.publishErr = nil }) // no Check has found it yet
			if i == 0 {
				h.registeredWithin(time.Second)
			}
		}
		time.Sleep(retakeWait - 10*time.Millisecond)
		h.publications(2)
		h.registeredWithin(time.Second)
	})
}

// A withdrawal in between does not change that, whether the path was taken before it or after it.
func TestLimitBesideASidecarAfterAWithdrawal(t *testing.T) {
	for _, before := range []bool{true, false} {
		runHarness(t, readyWorld(), base, func(h *harness) {
			taken := func(w *world) { w.sock.Place, w.publishErr = status.Foreign, conflict{} }
			h.w.set(taken)
			time.Sleep(time.Second)
			h.state(string(status.Conflict))
			h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Missing, nil })
			h.registeredWithin(time.Second)
			if before {
				h.w.set(taken)
				time.Sleep(time.Second)
				h.state(string(status.Conflict))
			}
			h.w.set(func(w *world) {
				w.report, w.publishErr = status.Report{Driver: status.Mismatch, Reason: "another"}, nil
			})
			h.state(string(status.Mismatch))
			if !before {
				h.w.set(taken)
			}
			h.w.set(func(w *world) { w.report = ready() })
			if !before {
				h.state(string(status.Conflict))
				h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Missing, nil })
			}
			time.Sleep(retakeWait - 10*time.Millisecond)
			h.publications(2)
			h.registeredWithin(time.Second)
		})
	}
}

// A request is a publication of its own, also if another registrar has the path meanwhile.
func TestReregisterBesideASidecarIsCounted(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Foreign, conflict{} })
		time.Sleep(time.Second)
		h.state(string(status.Conflict))
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		h.state(string(status.Conflict))
		h.w.set(func(w *world) { w.publishErr = nil })
		h.registeredWithin(time.Second)
		if n := h.status().Republications; n != 2 {
			t.Errorf("%d republications, want one because of the sidecar and one for the request", n)
		}
	})
}

// An hour after the last time the path is taken over at once again.
func TestLimitBesideASidecarEnds(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for range 5 {
			h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Foreign, conflict{} })
			time.Sleep(time.Second)
			h.state(string(status.Conflict))
			h.w.set(func(w *world) { w.sock.Place, w.publishErr = status.Missing, nil })
			h.registeredWithin(2 * quietSocket)
			time.Sleep(time.Hour)
		}
	})
}

// A command does not wait, whatever else does: the reason names a time, and this is the way to do
// it now.
func TestLimitDoesNotHoldReregister(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range alterFree + 1 {
			h.publications(1 + i)
			h.w.set(func(w *world) { w.report.Identity.MaxVolumes++ })
		}
		if s := h.status(); s.DampedUntil.IsZero() || !strings.Contains(s.Reason, "volume limit") {
			t.Fatalf("not damped: %+v", s)
		}
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		h.publications(alterFree + 2)
		h.state("registered")
		if s := h.status(); !s.DampedUntil.IsZero() {
			t.Errorf("still damped: %+v", s)
		}
	})
}

// Rare changes are never delayed.
func TestLimitDoesNotDelayRareChanges(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range 24 {
			time.Sleep(10 * time.Minute)
			h.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("n", i) })
			h.publications(i + 2)
		}
	})
}

// A recursive delete of the directory has a second in which nothing is created.
func TestRestoreDirectoryAfterASecond(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.sock.Place = status.Missing })
		time.Sleep(quietSocket / 2)
		h.w.set(func(w *world) { w.sock.DirMissing = true })
		time.Sleep(quietDirectory - time.Millisecond)
		h.publications(1)
		time.Sleep(time.Millisecond)
		h.publications(2)
		h.state("registered")
	})
}

// A path that cannot be looked at says nothing: neither missing nor replaced.
func TestRestoreNotAfterAFailedCheck(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) {
			w.checkErr, w.sock.Place = errors.New("the file system does not answer"), status.Missing
		})
		time.Sleep(time.Hour)
		h.publications(1)
		if s := h.status(); s.Reason != "the file system does not answer" {
			t.Errorf("reason %q", s.Reason)
		}
		h.w.set(func(w *world) { w.checkErr = nil })
		time.Sleep(quietSocket)
		h.publications(2)
		h.state("registered")
	})
}

// A kubelet before 1.36 whose refusal was lost on the way keeps the plugin, and never comes back.
func TestSilentKubelet(t *testing.T) {
	w := readyWorld()
	w.accept = nil
	runHarness(t, w, base, func(h *harness) {
		h.w.set(func(w *world) { w.sock.GetInfoAt = time.Now() })
		time.Sleep(kubeletRetries - time.Second)
		h.publications(1)
		h.w.set(func(w *world) { w.accept = func(status.Announcement) (bool, string) { return true, "" } })
		time.Sleep(2 * time.Second)
		h.publications(2)
		h.state("registered")
	})
}

func TestReregisterDuringAPublication(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		hold := make(chan struct{})
		h.w.set(func(w *world) { w.hold = hold })
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // it is at work
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		close(hold)
		h.publications(3)
		h.state("registered")
	})
}

func TestStatusNamesAnotherSocket(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.set(func(w *world) { w.sock.AlsoServed = "also served at /reg/other by process 7" })
		h.w.word(false, "already registered")
		h.state("refused")
		if s := h.status(); s.Reason != `the kubelet refused: "already registered"; also served at /reg/other by process 7` {
			t.Errorf("reason %q", s.Reason)
		}
		h.publications(1)
	})
}

// The watchdog's question causes no look at anything.
func TestAlive(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.state("registered")
		h.w.mu.Lock()
		asks, checks := h.w.asks, h.w.checks
		h.w.mu.Unlock()
		for range 100 {
			if err := h.reg.Alive(h.Context()); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if h.w.asks != asks || h.w.checks != checks {
			t.Errorf("%d asks and %d checks more", h.w.asks-asks, h.w.checks-checks)
		}
	})
}

// A registrar that leaves tries until its socket is withdrawn, and ends then.
func TestDisabledIsWithdrawn(t *testing.T) {
	runFailingWithdrawal(t, func(h *harness) {
		time.Sleep(time.Minute)
		if err := h.reg.Alive(h.Context()); err != nil {
			t.Error(err)
		}
		h.w.mu.Lock()
		h.w.withdrawErr = nil
		h.w.mu.Unlock()
		time.Sleep(2 * time.Second)
		<-h.reg.done
		if err := h.reg.Alive(context.Background()); err != nil {
			t.Error(err)
		}
		if err := h.reg.Update(context.Background(), base, nil); err == nil || !strings.Contains(err.Error(), "foo: its registrar has ended") {
			t.Error(err)
		}
		if _, _, n := h.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}
