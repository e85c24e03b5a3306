package registrar

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// Whatever flaps, and however long: at most 12 publications in any hour, and the last state is
// reached within 5 minutes after its end, of which the status tells.
func TestFlappingForHoursIsDamped(t *testing.T) {
	absent := status.Report{Driver: status.Absent, Reason: "gone"}
	mismatch := status.Report{Driver: status.Mismatch, Reason: "another driver"}
	for _, period := range []time.Duration{time.Second, 7 * time.Second, time.Minute, 4 * time.Minute, 290 * time.Second, 5 * time.Minute, 8 * time.Minute, 10 * time.Minute} {
		for name, c := range map[string]struct {
			away  status.Report
			share int // of the period, in percent, for which the driver is ready
		}{
			"mismatch": {mismatch, 50}, "mismatch for a moment": {mismatch, 99}, "crash loop, withdrawn": {absent, 50},
		} {
			t.Run(fmt.Sprint(name, " each ", period), func(t *testing.T) {
				w := readyWorld()
				table := base
				table.WhenGone, table.WithdrawAfter = config.Withdraw, period/10
				runHarness(t, w, table, func(h *harness) {
					var at []time.Time
					h.w.mu.Lock()
					h.w.onPublish = func() { at = append(at, time.Now()) }
					h.w.mu.Unlock()
					up := period * time.Duration(c.share) / 100
					for end := time.Now().Add(3 * time.Hour); time.Now().Before(end); {
						h.w.set(func(w *world) { w.report = ready() })
						time.Sleep(up)
						h.w.set(func(w *world) { w.report = c.away })
						time.Sleep(period - up)
					}
					h.w.set(func(w *world) { w.report = ready() })
					if s := h.status(); s.State != "registered" && s.DampedUntil.IsZero() {
						t.Errorf("nothing says when it goes on: %+v", s)
					}
					time.Sleep(5 * time.Minute)
					h.state("registered")
					synctest.Wait()
					for i := range at {
						if i+churnMost < len(at) && at[i+churnMost].Sub(at[i]) < time.Hour {
							t.Fatalf("%d publications within %s", churnMost+1, at[i+churnMost].Sub(at[i]))
						}
					}
				})
			})
		}
	}
}

// Who asks for it does not wait, whatever else is to be done: the reason names a time, and this
// is the way to do it now.
func TestReregisterIsNotDamped(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range churnFree {
			h.publications(i + 1)
			h.w.set(func(w *world) { w.sock.Place = status.Missing })
			time.Sleep(quietSocket)
		}
		if s := h.status(); s.DampedUntil.IsZero() {
			t.Fatalf("not damped: %+v", s)
		}
		if err := h.reg.Reregister(h.Context(), false); err != nil {
			t.Fatal(err)
		}
		h.publications(churnFree + 1)
		h.state("registered")
		if s := h.status(); !s.DampedUntil.IsZero() {
			t.Errorf("still damped: %+v", s)
		}
	})
}

// What happens seldom is never delayed.
func TestASingleChangeIsNeverDelayed(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		for i := range 24 {
			time.Sleep(10 * time.Minute)
			h.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("n", i) })
			h.publications(i + 2)
		}
	})
}

// Who removes the whole directory is given a second, and is not disturbed in it.
func TestADirectoryIsMadeAgainAfterASecondOfQuiet(t *testing.T) {
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
func TestAPathThatCannotBeSeenIsLeftAlone(t *testing.T) {
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
func TestALostNotificationIsNotWaitedForForEver(t *testing.T) {
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

// What the kubelet has learned by itself is written down: the next process knows it.
func TestWhatTheKubeletLearnedIsAcknowledged(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.report.Identity.Topology = map[string]string{"zone": "b"} })
		time.Sleep(time.Minute)
		h.w.word(true, "") // the label was removed and the kubelet restarted
		synctest.Wait()
		h.w.mu.Lock()
		defer h.w.mu.Unlock()
		if got := h.w.sock.Announced.Identity.Topology["zone"]; got != "b" {
			t.Errorf("the socket has zone %q", got)
		}
	})
}

// Where the link points is nothing that the kubelet is told: a moved socket costs no registration,
// but that there is a link at all does.
func TestTheTargetOfTheLinkCostsNoRegistration(t *testing.T) {
	w := readyWorld()
	table := base
	table.Endpoint, table.EndpointLink = "/run/a/csi.sock", true
	runHarness(t, w, table, func(h *harness) {
		for i, link := range []bool{true, false} {
			table.Endpoint, table.EndpointLink = "/run/b/csi.sock", link
			if err := h.reg.Update(h.Context(), table, nil); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			h.publications(1 + i)
			h.w.mu.Lock()
			got := h.w.sock.Announced
			h.w.mu.Unlock()
			if endpoint, target := rootDir.Announced(table); got.LinkTarget != target || got.Endpoint != endpoint {
				t.Errorf("announced %+v, want %s to %s", got, endpoint, target)
			}
		}
	})
}

func TestReregisterWhileItIsBeingPublished(t *testing.T) {
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

func TestAnotherSocketOfTheSameDriverIsNamed(t *testing.T) {
	runHarness(t, readyWorld(), base, func(h *harness) {
		h.w.set(func(w *world) { w.sock.AlsoServed = "also served at /reg/other by process 7" })
		h.state("registered")
		if s := h.status(); s.Reason != "also served at /reg/other by process 7" {
			t.Errorf("reason %q", s.Reason)
		}
		h.publications(1)
	})
}

// The watchdog's question causes no look at anything.
func TestAliveLooksAtNothing(t *testing.T) {
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
func TestLeavingWithdrawsAndEnds(t *testing.T) {
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
