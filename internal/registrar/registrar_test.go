package registrar

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/status"
)

func TestAbsentThenReadyIsRegisteredAtTheHint(t *testing.T) {
	live(t, newWorld(), base, func(l *lives) {
		l.state("absent")
		time.Sleep(60 * time.Minute)
		start := time.Now()
		l.w.set(func(w *world) { w.report = ready() })
		l.state("registered")
		if d := time.Since(start); d != 0 {
			t.Errorf("took %s of virtual time: something waited for a timer", d)
		}
		if s := l.status(); s.NodeID != "n1" || s.RegisteredAt.IsZero() || s.Reason != "" {
			t.Errorf("status %+v", s)
		}
		l.publications(1)
	})
}

func TestWithoutHintsTheBackoffFindsTheDriver(t *testing.T) {
	live(t, newWorld(), base, func(l *lives) {
		time.Sleep(time.Hour)
		l.w.mu.Lock()
		l.w.report = ready()
		asks := l.w.asks
		l.w.mu.Unlock()
		if asks > 150 || asks < 100 {
			t.Errorf("an hour of absence cost %d questions, want about 120", asks)
		}
		time.Sleep(askAbsentMost + askAbsentMost/8)
		l.state("registered")
	})
}

func TestADayOfAbsenceIsAFewLines(t *testing.T) {
	live(t, newWorld(), base, func(l *lives) {
		for i := range 24 * 60 {
			time.Sleep(time.Minute)
			l.w.set(func(w *world) { w.report.Reason = fmt.Sprint("reason ", i%7) })
		}
		if n := l.log.len(); n > 30 {
			t.Errorf("%d lines", n)
		}
	})
}

// The first line waits for the first answer: it says why.
func TestAbsenceIsToldWithItsReason(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Absent, Reason: "there is nothing"}
	live(t, w, base, func(l *lives) {
		time.Sleep(time.Minute)
		want := []string{"waiting for the driver: there is nothing"}
		if said := l.log.said(); !slices.Equal(said, want) {
			t.Errorf("%q, want %q", said, want)
		}
	})
}

func TestStartingIsAskedEachSecond(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
	live(t, w, base, func(l *lives) {
		time.Sleep(10 * time.Second)
		l.state("starting")
		if s := l.status(); s.Reason != "Probe: not ready" {
			t.Errorf("reason %q", s.Reason)
		}
		l.w.mu.Lock()
		asks := l.w.asks
		l.w.report = ready()
		l.w.mu.Unlock()
		if asks < 8 || asks > 13 {
			t.Errorf("asked %d times in 10 s", asks)
		}
		time.Sleep(1200 * time.Millisecond)
		l.state("registered")
	})
}

func TestAFlappingDriverCannotKeepUsBusy(t *testing.T) {
	w := newWorld()
	w.report = status.Report{Driver: status.Starting, Reason: "closes at once"}
	live(t, w, base, func(l *lives) {
		for range 10000 {
			time.Sleep(time.Millisecond)
			poke(l.w.hints)
		}
		if asks, _, _ := l.counts(); asks > 60 {
			t.Errorf("10,000 hints in 10 s caused %d questions", asks)
		}
	})
}

func TestRestartUnchangedTouchesNothing(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		for range 100 {
			l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
			if s := l.status(); s.State != "registered" || s.Driver != status.Absent || !strings.Contains(s.Reason, "kept") {
				t.Fatalf("status %+v", s)
			}
			time.Sleep(time.Second)
			l.w.set(func(w *world) { w.report = ready() })
			synctest.Wait()
		}
		l.publications(1)
		if _, _, n := l.counts(); n != 0 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

func TestIdleCostsNothing(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		before, _, _ := l.counts()
		time.Sleep(24 * time.Hour)
		if after, _, _ := l.counts(); after != before {
			t.Errorf("%d questions in a quiet day", after-before)
		}
		l.publications(1)
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
			w := newWorld()
			w.report = ready()
			live(t, w, base, func(l *lives) {
				l.state("registered")
				l.w.set(func(w *world) {
					w.report = ready()
					c.change(&w.report.Identity)
				})
				l.state("registered")
				time.Sleep(time.Hour)
				l.publications(1 + c.more)
				if s := l.status(); !strings.Contains(s.Reason, c.reason) || (c.reason == "") != (s.Reason == "") {
					t.Errorf("reason %q, want %q", s.Reason, c.reason)
				}
				if s := l.status(); s.RepublicationsBy[string(CauseChanged)] != uint64(c.more) {
					t.Errorf("counted %v", s.RepublicationsBy)
				}
			})
		})
	}
}

func TestEndpointChangeIsToldEvenWithMovedTopology(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.set(func(w *world) {
			w.report = ready()
			w.report.Identity.Topology = map[string]string{"zone": "b"}
		})
		set := base
		set.Endpoint = "/elsewhere/foo.sock"
		if err := l.reg.Update(l.Context(), set, nil); err != nil {
			t.Fatal(err)
		}
		l.publications(2)
		if got := l.w.published[1].Endpoint; got != set.Endpoint {
			t.Errorf("told %q", got)
		}
	})
}

// The kubelet asks the driver itself. What it has said yes to needs nobody's attention, and
// hides no later change.
func TestTopologyThatTheKubeletTook(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		moved := func(w *world) { w.report.Identity.Topology = map[string]string{"zone": "b"} }
		l.w.set(moved)
		if s := l.status(); !strings.Contains(s.Reason, "remove the label") {
			t.Fatalf("reason %q", s.Reason)
		}
		time.Sleep(time.Hour)
		l.w.word(true, "") // the label was removed and the kubelet restarted
		if s := l.status(); s.State != "registered" || s.Reason != "" {
			t.Errorf("status %+v", s)
		}
		time.Sleep(time.Minute)
		l.publications(1)
		l.w.set(func(w *world) { w.report.Identity.NodeID = "n2" })
		l.publications(2)
		time.Sleep(time.Hour)
		l.publications(2)
	})
}

// A yes to a driver that we have not heard since its restart says nothing of what we know.
func TestTopologyThatTheKubeletMayNotHaveTaken(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.report.Identity.Topology = map[string]string{"zone": "b"} })
		time.Sleep(time.Hour)
		l.w.set(func(w *world) { w.hang = true })
		time.Sleep(time.Second)
		l.w.word(true, "")
		if s := l.status(); !strings.Contains(s.Reason, "remove the label") {
			t.Errorf("reason %q", s.Reason)
		}
	})
}

func TestADriverThatInventsNodeIDsDoesNotChurn(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		for i := range 3600 {
			l.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("n", i) })
			time.Sleep(time.Second)
		}
		if _, n, _ := l.counts(); n > churnMost+1 {
			t.Errorf("published %d times in an hour", n)
		}
	})
}

func TestMismatchIsWithdrawn(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Mismatch, Reason: "calls itself bar"}
		})
		l.state("mismatch")
		if _, _, n := l.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
		l.w.set(func(w *world) { w.report = ready() })
		l.state("registered")
	})
}

func TestWithdrawAfter(t *testing.T) {
	w := newWorld()
	w.report = ready()
	set := base
	set.Withdraw, set.WithdrawAfter = true, 30*time.Second
	live(t, w, set, func(l *lives) {
		gone := func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} }
		l.w.set(gone)
		time.Sleep(29 * time.Second)
		l.state("registered")
		l.w.set(func(w *world) { w.report = ready() })
		time.Sleep(29 * time.Second)
		l.state("registered")
		l.w.set(gone)
		l.state("registered")
		time.Sleep(30*time.Second + time.Millisecond)
		l.state("absent")
		if _, _, n := l.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

// A driver that answers is not gone, ready or not.
func TestWithdrawAfterCountsAbsenceAlone(t *testing.T) {
	w := newWorld()
	w.report = ready()
	set := base
	set.Withdraw, set.WithdrawAfter = true, 30*time.Second
	live(t, w, set, func(l *lives) {
		l.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
		})
		time.Sleep(5 * time.Minute)
		l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(29 * time.Second)
		l.state("registered")
		time.Sleep(time.Second + time.Millisecond)
		l.state("absent")
	})
}

// A driver is gone when it says so, not while nobody knows: a daemon that was restarted has not
// heard of it yet, and one that was stopped for a while may have missed its return.
func TestWithdrawOnlyOnFreshWord(t *testing.T) {
	set := base
	set.Withdraw, set.WithdrawAfter = true, 10*time.Second
	adopted := status.Socket{Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true, PublishedAt: time.Now(),
		Announced: status.Announcement{Endpoint: base.Endpoint, Versions: base.Versions, Identity: ready().Identity},
		GetInfoAt: time.Now(), Notification: status.Notification{At: time.Now(), Registered: true}}
	t.Run("slow at the start", func(t *testing.T) {
		w := newWorld()
		w.sock, w.hang = adopted, true
		live(t, w, set, func(l *lives) {
			time.Sleep(time.Minute)
			l.state("registered")
		})
	})
	t.Run("back without a hint", func(t *testing.T) {
		w := newWorld()
		w.sock = adopted
		live(t, w, set, func(l *lives) {
			time.Sleep(9 * time.Second)
			w.mu.Lock()
			w.report = ready()
			w.mu.Unlock()
			time.Sleep(2 * time.Second)
			l.state("registered")
			if s := l.status(); s.Driver != status.Ready {
				t.Errorf("the driver is %s", s.Driver)
			}
		})
	})
	t.Run("gone", func(t *testing.T) {
		w := newWorld()
		w.sock = adopted
		live(t, w, set, func(l *lives) {
			time.Sleep(9 * time.Second)
			l.state("registered")
			time.Sleep(1*time.Second + time.Millisecond)
			l.state("absent")
		})
	})
}

func TestGuard(t *testing.T) {
	for _, place := range []status.Place{status.Missing, status.Foreign} {
		t.Run(string(place), func(t *testing.T) {
			w := newWorld()
			w.report = ready()
			live(t, w, base, func(l *lives) {
				l.state("registered")
				l.w.set(func(w *world) { w.sock.Place = place })
				l.publications(1) // who removes more is not disturbed
				time.Sleep(quietSocket)
				l.state("registered")
				l.publications(2)
				// Somebody who removes it for ever does not make us publish for ever.
				for range 60_000 {
					l.w.set(func(w *world) { w.sock.Place = place })
					time.Sleep(time.Millisecond)
				}
				if _, n, _ := l.counts(); n > churnFree {
					t.Errorf("published %d times in a minute", n)
				}
				if s := l.status(); s.DampedUntil.IsZero() || !strings.Contains(s.Reason, "changed 9 times within an hour") {
					t.Errorf("status %+v", s)
				}
				time.Sleep(churnStable)
				l.state("registered")
			})
		})
	}
}

func TestARemovedSocketOfAnAbsentDriverWaitsForIt(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		l.state("registered")
		l.w.set(func(w *world) { w.sock.Place = status.Missing })
		time.Sleep(time.Minute)
		l.state("absent")
		l.publications(1)
		l.w.set(func(w *world) { w.report = ready() })
		time.Sleep(quietSocket)
		l.state("registered")
	})
}

func TestConflictIsFollowed(t *testing.T) {
	w := newWorld()
	w.report, w.publishErr = ready(), conflict{}
	live(t, w, base, func(l *lives) {
		l.state("conflict")
		time.Sleep(time.Hour)
		l.state("conflict")
		if n := l.log.len(); n > 5 {
			t.Errorf("%d lines for an hour of conflict", n)
		}
		// The other leaves without a hint.
		l.w.mu.Lock()
		l.w.publishErr = nil
		l.w.mu.Unlock()
		time.Sleep(retryConflictMost + retryConflictMost/8)
		l.state("registered")
	})
}

func TestConflictEndsWithItsDriver(t *testing.T) {
	w := newWorld()
	w.report, w.publishErr = ready(), conflict{}
	live(t, w, base, func(l *lives) {
		l.state("conflict")
		l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		l.state("absent")
	})
}

func TestAFullDiskIsSaidAndSurvived(t *testing.T) {
	w := newWorld()
	w.report, w.publishErr = ready(), errFull
	live(t, w, base, func(l *lives) {
		time.Sleep(time.Minute)
		l.state("ready")
		if s := l.status(); s.Reason != errFull.Error() {
			t.Errorf("reason %q", s.Reason)
		}
		l.w.mu.Lock()
		l.w.publishErr = nil
		l.w.mu.Unlock()
		time.Sleep(1200 * time.Millisecond)
		l.state("registered")
	})
}

func TestRefusedThenTheKubeletComesBack(t *testing.T) {
	w := newWorld()
	w.report = ready()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	live(t, w, base, func(l *lives) {
		l.state("refused")
		if s := l.status(); s.KubeletError != "no" {
			t.Errorf("status %+v", s)
		}
		for range 30 { // kubelet v1.36 in its backoff
			time.Sleep(122 * time.Second)
			l.w.word(false, "no")
		}
		l.publications(1)
		l.w.word(true, "")
		l.state("registered")
		l.publications(1)
	})
}

func TestRefusedByAnOlderKubelet(t *testing.T) {
	w := newWorld()
	w.report = ready()
	refuse := true
	w.accept = func(status.Announcement) (bool, string) { return !refuse, "no" }
	live(t, w, base, func(l *lives) {
		l.state("refused")
		time.Sleep(149 * time.Second)
		l.publications(1)
		time.Sleep(2 * time.Second)
		l.publications(2)
		l.w.set(func(*world) { refuse = false })
		time.Sleep(151 * time.Second)
		l.state("registered")
		l.publications(3)
	})
}

func TestNobodyAsksIsSaid(t *testing.T) {
	for recreated, want := range map[bool]string{true: "restart the kubelet", false: "it does not run"} {
		w := newWorld()
		w.report, w.accept, w.sock.DirRecreated = ready(), nil, recreated
		live(t, w, base, func(l *lives) {
			l.state("published")
			if s := l.status(); s.Reason != "" {
				t.Errorf("complains at once: %q", s.Reason)
			}
			time.Sleep(6 * time.Second)
			if s := l.status(); !strings.Contains(s.Reason, want) {
				t.Errorf("reason %q, want %q", s.Reason, want)
			}
			time.Sleep(time.Hour)
			l.publications(1)
		})
	}
}

func TestReturnAfterRefusalPublishesOnce(t *testing.T) {
	w := newWorld()
	w.report = ready()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	live(t, w, base, func(l *lives) {
		l.state("refused")
		l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		synctest.Wait()
		l.w.set(func(w *world) { w.report = ready() })
		l.publications(2)
		time.Sleep(time.Minute)
		l.publications(2)
	})
}

// What was asked for because of a refusal is over when the kubelet has spoken again.
func TestAYesSettlesWhatWasAsked(t *testing.T) {
	w := newWorld()
	w.report = ready()
	w.accept = func(status.Announcement) (bool, string) { return false, "no" }
	live(t, w, base, func(l *lives) {
		l.state("refused")
		time.Sleep(time.Second)
		l.w.set(func(w *world) {
			w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
		})
		synctest.Wait()
		set := base
		set.Withdraw, set.WithdrawAfter = true, time.Hour
		if err := l.reg.Update(l.Context(), set, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		l.w.word(true, "") // the kubelet's own retry
		time.Sleep(time.Hour)
		l.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Minute)
		l.state("registered")
		l.publications(1)
	})
}

// A driver's return is news to the refusal that stood then, not to those that come later.
func TestAReturnOfYesterdayIsNoNews(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		l.w.set(func(w *world) { w.report = ready() })
		time.Sleep(24 * time.Hour)
		l.w.word(false, "the API server is away")
		time.Sleep(149 * time.Second)
		l.publications(1)
	})
}

// The kubelet's try began before the driver came back, and so did not see it.
func TestAReturnDuringTheKubeletsTry(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.report = status.Report{Driver: status.Absent, Reason: "gone"} })
		time.Sleep(time.Second)
		l.w.set(func(w *world) { w.sock.GetInfoAt = time.Now() })
		time.Sleep(time.Second)
		l.w.set(func(w *world) { w.report = ready() })
		time.Sleep(time.Second)
		l.w.set(func(w *world) { w.sock.Notification = status.Notification{At: time.Now(), Error: "no such file"} })
		l.state("registered")
		l.publications(2)
	})
}

// An older kubelet refused; the daemon began while the driver was away.
func TestAReturnAfterTheStart(t *testing.T) {
	w := newWorld()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) {
			w.sock = status.Socket{Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true, PublishedAt: time.Now(),
				Announced: status.Announcement{Endpoint: base.Endpoint, Versions: base.Versions, Identity: ready().Identity},
				GetInfoAt: time.Now(), Notification: status.Notification{At: time.Now(), Error: "no"}}
		})
		time.Sleep(time.Minute)
		l.w.set(func(w *world) { w.report = ready() })
		l.state("registered")
		l.publications(1)
	})
}

// No driver under a refusal makes the kubelet's work ours to repeat without end.
func TestADriverThatFlapsUnderARefusalDoesNotChurn(t *testing.T) {
	for _, c := range []struct {
		name string
		flap func(*world)
		most int
	}{
		{"closes idle connections", func(w *world) {}, churnMost},
		{"crashes and is back", func(w *world) { w.report.Replaced = true }, churnMost},
		{"is not ready for a moment", func(w *world) {
			if w.report = ready(); w.asks%2 == 0 {
				w.report = status.Report{Driver: status.Starting, Reason: "Probe: not ready"}
			}
		}, churnMost},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.report = ready()
			w.accept = func(status.Announcement) (bool, string) { return false, "no" }
			live(t, w, base, func(l *lives) {
				for range 7190 {
					time.Sleep(500 * time.Millisecond)
					l.w.set(c.flap)
					synctest.Wait()
				}
				if _, n, _ := l.counts(); n < 2 || n > c.most {
					t.Errorf("published %d times in an hour, want at most %d", n, c.most)
				}
			})
		})
	}
}

// What was let pass once is tried again soon, also when it was the last change of the hour.
func TestATryAgainIsNotDamped(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		for i := range churnMost - 2 {
			l.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("m", i) })
			time.Sleep(churnStable + time.Minute)
		}
		l.publications(churnMost - 1)
		l.w.set(func(w *world) { w.report.Identity.NodeID, w.publishErr = "last", conflict{} })
		time.Sleep(churnStable + time.Minute)
		l.state("conflict")
		l.w.mu.Lock()
		l.w.publishErr = nil
		l.w.mu.Unlock()
		time.Sleep(retryConflictMost + retryConflictMost/4) // its jitter
		l.state("registered")
		l.publications(churnMost)
	})
}

// A kubelet that restarts says yes again: that is not how long the registration took.
func TestTookIsOfTheFirstYes(t *testing.T) {
	w := newWorld()
	w.report, w.delay = ready(), 700*time.Millisecond
	live(t, w, base, func(l *lives) {
		time.Sleep(time.Second)
		if s := l.status(); s.Took != 700*time.Millisecond {
			t.Errorf("took %s", s.Took)
		}
		time.Sleep(time.Hour)
		l.w.word(true, "")
		if s := l.status(); s.Took != 700*time.Millisecond {
			t.Errorf("took %s after the kubelet's restart", s.Took)
		}
	})
	// The daemon restarts after that.
	w = newWorld()
	published := time.Date(1999, 12, 31, 0, 0, 0, 0, time.UTC)
	w.sock = status.Socket{Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true, PublishedAt: published,
		FirstAcceptedAt: published.Add(700 * time.Millisecond), Notification: status.Notification{At: published.Add(24 * time.Hour), Registered: true}}
	live(t, w, base, func(l *lives) {
		if s := l.status(); s.Took != 700*time.Millisecond {
			t.Errorf("took %s after the daemon's restart", s.Took)
		}
	})
}

func TestReregister(t *testing.T) {
	w := newWorld()
	live(t, w, base, func(l *lives) {
		if err := l.reg.Reregister(l.Context()); err == nil || !strings.Contains(err.Error(), "absent") {
			t.Errorf("of an absent driver: %v", err)
		}
		l.w.set(func(w *world) { w.report = ready() })
		l.state("registered")
		if err := l.reg.Reregister(l.Context()); err != nil {
			t.Fatal(err)
		}
		l.publications(2)
		l.state("registered")
	})
}

// A driver that hangs for ever holds up neither the repair of the socket, nor commands.
func TestAHangingDriverHoldsUpNothing(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.set(func(w *world) { w.hang = true })
		synctest.Wait()
		l.w.set(func(w *world) { w.sock.Place = status.Missing })
		time.Sleep(quietSocket)
		l.publications(2)
		l.state("registered")
		ctx, cancel := context.WithTimeout(l.Context(), time.Second)
		defer cancel()
		if err := l.reg.Alive(ctx); err != nil {
			t.Error(err)
		}
	})
}

func TestANewClientTakesOver(t *testing.T) {
	w := newWorld()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.hang = true })
		other := newWorld()
		other.report = ready()
		set := base
		set.Socket = "/run/other.sock"
		if err := l.reg.Update(l.Context(), set, other); err != nil {
			t.Fatal(err)
		}
		l.state("registered")
		if s := l.status(); s.Socket != set.Socket {
			t.Errorf("status %+v", s)
		}
	})
}

func TestAdoptedIsRegisteredBeforeTheDriverAnswers(t *testing.T) {
	w := newWorld()
	w.hang = true
	id := ready().Identity
	w.sock = status.Socket{Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true, PublishedAt: time.Now(),
		Announced:    status.Announcement{Endpoint: base.Endpoint, Versions: base.Versions, Identity: id},
		Notification: status.Notification{At: time.Now(), Registered: true}}
	live(t, w, base, func(l *lives) {
		l.state("registered")
		if s := l.status(); s.NodeID != "n1" {
			t.Errorf("status %+v", s)
		}
		l.publications(0)
	})
}

// A reason that reads differently each time is still no flood in the log.
func TestTroubleThatChangesItsWordsIsNotRepeatedForEver(t *testing.T) {
	w := newWorld()
	w.report, w.publishErr = ready(), errFull
	live(t, w, base, func(l *lives) {
		for i := range 3600 {
			time.Sleep(time.Second)
			l.w.mu.Lock()
			l.w.publishErr = fmt.Errorf("trouble %d", i)
			l.w.mu.Unlock()
		}
		synctest.Wait()
		if n := l.log.len(); n > 20 {
			t.Errorf("%d lines in an hour", n)
		}
	})
}
