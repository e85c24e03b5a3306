package registrar

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/status"
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
				w := newWorld()
				w.report = ready()
				set := base
				set.Withdraw, set.WithdrawAfter = true, period/10
				live(t, w, set, func(l *lives) {
					var at []time.Time
					l.w.mu.Lock()
					l.w.onPublish = func() { at = append(at, time.Now()) }
					l.w.mu.Unlock()
					up := period * time.Duration(c.share) / 100
					for end := time.Now().Add(3 * time.Hour); time.Now().Before(end); {
						l.w.set(func(w *world) { w.report = ready() })
						time.Sleep(up)
						l.w.set(func(w *world) { w.report = c.away })
						time.Sleep(period - up)
					}
					l.w.set(func(w *world) { w.report = ready() })
					if s := l.status(); s.State != "registered" && s.DampedUntil.IsZero() {
						t.Errorf("nothing says when it goes on: %+v", s)
					}
					time.Sleep(5 * time.Minute)
					l.state("registered")
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
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		for i := range churnFree {
			l.publications(i + 1)
			l.w.set(func(w *world) { w.sock.Place = status.Missing })
			time.Sleep(quietSocket)
		}
		if s := l.status(); s.DampedUntil.IsZero() {
			t.Fatalf("not damped: %+v", s)
		}
		if err := l.reg.Reregister(l.Context()); err != nil {
			t.Fatal(err)
		}
		l.publications(churnFree + 1)
		l.state("registered")
		if s := l.status(); !s.DampedUntil.IsZero() {
			t.Errorf("still damped: %+v", s)
		}
	})
}

// What happens seldom is never delayed.
func TestASingleChangeIsNeverDelayed(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		for i := range 24 {
			time.Sleep(10 * time.Minute)
			l.w.set(func(w *world) { w.report.Identity.NodeID = fmt.Sprint("n", i) })
			l.publications(i + 2)
		}
	})
}

// Who removes the whole directory is given a second, and is not disturbed in it.
func TestADirectoryIsMadeAgainAfterASecondOfQuiet(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.sock.Place = status.Missing })
		time.Sleep(quietSocket / 2)
		l.w.set(func(w *world) { w.sock.DirMissing = true })
		time.Sleep(quietDirectory - time.Millisecond)
		l.publications(1)
		time.Sleep(time.Millisecond)
		l.publications(2)
		l.state("registered")
	})
}

// A path that cannot be looked at says nothing: neither missing nor replaced.
func TestAPathThatCannotBeSeenIsLeftAlone(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.set(func(w *world) {
			w.checkErr, w.sock.Place = errors.New("the file system does not answer"), status.Missing
		})
		time.Sleep(time.Hour)
		l.publications(1)
		if s := l.status(); s.Reason != "the file system does not answer" {
			t.Errorf("reason %q", s.Reason)
		}
		l.w.set(func(w *world) { w.checkErr = nil })
		time.Sleep(quietSocket)
		l.publications(2)
		l.state("registered")
	})
}

// A kubelet before 1.36 whose refusal was lost on the way keeps the plugin, and never comes back.
func TestALostNotificationIsNotWaitedForForEver(t *testing.T) {
	w := newWorld()
	w.report, w.accept = ready(), nil
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.sock.GetInfoAt = time.Now() })
		time.Sleep(kubeletRetries - time.Second)
		l.publications(1)
		l.w.set(func(w *world) { w.accept = func(status.Announcement) (bool, string) { return true, "" } })
		time.Sleep(2 * time.Second)
		l.publications(2)
		l.state("registered")
	})
}

// What the kubelet has learned by itself is written down: the next process knows it.
func TestWhatTheKubeletLearnedIsAcknowledged(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.report.Identity.Topology = map[string]string{"zone": "b"} })
		time.Sleep(time.Minute)
		l.w.word(true, "") // the label was removed and the kubelet restarted
		synctest.Wait()
		l.w.mu.Lock()
		defer l.w.mu.Unlock()
		if got := l.w.sock.Announced.Identity.Topology["zone"]; got != "b" {
			t.Errorf("the socket has zone %q", got)
		}
	})
}

// Where the link points is nothing that the kubelet is told: a moved socket costs no registration,
// but that there is a link at all does.
func TestTheTargetOfTheLinkCostsNoRegistration(t *testing.T) {
	w := newWorld()
	w.report = ready()
	set := base
	set.Endpoint, set.LinkTarget = "/k/plugins/csi-registrar/a.sock", "/run/a/csi.sock"
	live(t, w, set, func(l *lives) {
		for i, target := range []string{"/run/b/csi.sock", ""} {
			set.LinkTarget = target
			if target == "" {
				set.Endpoint = "/run/b/csi.sock"
			}
			if err := l.reg.Update(l.Context(), set, nil); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			l.publications(1 + i)
			l.w.mu.Lock()
			got := l.w.sock.Announced
			l.w.mu.Unlock()
			if got.LinkTarget != target || got.Endpoint != set.Endpoint {
				t.Errorf("announced %+v, want %+v", got, set)
			}
		}
	})
}

func TestReregisterWhileItIsBeingPublished(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		hold := make(chan struct{})
		l.w.set(func(w *world) { w.hold = hold })
		if err := l.reg.Reregister(l.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // it is at work
		if err := l.reg.Reregister(l.Context()); err != nil {
			t.Fatal(err)
		}
		close(hold)
		l.publications(3)
		l.state("registered")
	})
}

func TestAnotherSocketOfTheSameDriverIsNamed(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.w.set(func(w *world) { w.sock.AlsoServed = "also served at /reg/other by process 7" })
		l.state("registered")
		if s := l.status(); s.Reason != "also served at /reg/other by process 7" {
			t.Errorf("reason %q", s.Reason)
		}
		l.publications(1)
	})
}

// The watchdog's question causes no look at anything.
func TestAliveLooksAtNothing(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.mu.Lock()
		asks, checks := l.w.asks, l.w.checks
		l.w.mu.Unlock()
		for range 100 {
			if err := l.reg.Alive(l.Context()); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if l.w.asks != asks || l.w.checks != checks {
			t.Errorf("%d asks and %d checks more", l.w.asks-asks, l.w.checks-checks)
		}
	})
}

// A registrar that leaves tries until its socket is withdrawn, and ends then.
func TestLeavingWithdrawsAndEnds(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.set(func(w *world) { w.withdrawErr = errors.New("read-only") })
		if err := l.reg.Update(l.Context(), leaving, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if s := l.status(); s.Reason != "read-only" {
			t.Errorf("reason %q", s.Reason)
		}
		if err := l.reg.Alive(l.Context()); err != nil {
			t.Error(err)
		}
		l.w.mu.Lock()
		l.w.withdrawErr = nil
		l.w.mu.Unlock()
		time.Sleep(2 * time.Second)
		<-l.reg.done
		if err := l.reg.Alive(context.Background()); !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "foo") {
			t.Error(err)
		}
		if _, _, n := l.counts(); n != 1 {
			t.Errorf("withdrawn %d times", n)
		}
	})
}

// It is configured again before it could be withdrawn.
func TestLeavingIsCalledOff(t *testing.T) {
	w := newWorld()
	w.report = ready()
	live(t, w, base, func(l *lives) {
		l.state("registered")
		l.w.set(func(w *world) { w.withdrawErr = errors.New("read-only") })
		if err := l.reg.Update(l.Context(), leaving, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if err := l.reg.Update(l.Context(), base, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		l.state("registered")
		l.publications(1)
	})
}
