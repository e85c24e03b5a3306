package registrar

import (
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/status"
)

// TestPublicationLimits checks each limit at its last number and one beyond, and that a publication
// counts for an hour, and not at its end.
func TestPublicationLimits(t *testing.T) {
	start := time.Now()
	now, cause, free := start.Add(30*time.Minute), start.Add(29*time.Minute), start.Add(28*time.Minute)
	last := func(n int) time.Time { return start.Add(time.Duration(n-1) * time.Second) } // of n
	for _, c := range []struct {
		kind publicationKind
		made int
		want time.Time // zero: at once
	}{
		{alter, 8, time.Time{}}, {alter, 9, cause.Add(4 * time.Minute)}, {alter, 11, cause.Add(4 * time.Minute)},
		{alter, 12, start.Add(time.Hour)}, {alter, 13, start.Add(time.Hour + time.Second)},
		{restore, 19, time.Time{}}, {restore, 20, last(20).Add(10 * time.Second)}, {restore, 21, last(21).Add(20 * time.Second)},
		{restore, 22, last(22).Add(40 * time.Second)}, {restore, 23, last(23).Add(time.Minute)}, {restore, 200, last(200).Add(time.Minute)},
		{renew, 9, time.Time{}}, {renew, 10, cause.Add(time.Minute)},
		{retake, 0, time.Time{}}, {retake, 1, free.Add(3 * time.Second)},
	} {
		var p publications
		for i := range c.made {
			p[c.kind] = append(p[c.kind], last(i+1))
		}
		if got := p.next(c.kind, cause, free, now); !got.Equal(c.want) {
			t.Errorf("kind %d, %d made: %s after the first, want %s", c.kind, c.made, got.Sub(start), c.want.Sub(start))
		}
		for _, other := range []publicationKind{alter, restore, renew, retake} {
			if other != c.kind && p.count(other, now) != 0 {
				t.Errorf("kind %d counts for kind %d", c.kind, other)
			}
		}
	}
	var p publications
	p[alter] = append(p[alter], start)
	if n := p.count(alter, start.Add(time.Hour-1)); n != 1 {
		t.Errorf("just before an hour: %d", n)
	}
	if n := p.count(alter, start.Add(time.Hour)); n != 0 {
		t.Errorf("after an hour: %d", n)
	}
}

// TestRestartsThatAreRemembered checks that the status has the last 1,000 restarts of a driver, the
// oldest first, and the number of all.
func TestRestartsThatAreRemembered(t *testing.T) {
	w := newWorld()
	runHarness(t, w, base, func(h *harness) {
		const all = 1003
		for range all + 1 { // the first is no restart
			for _, rep := range []status.Report{ready(), {Driver: status.Absent, Reason: "gone"}} {
				time.Sleep(time.Minute)
				h.w.set(func(w *world) { w.report = rep })
				synctest.Wait()
			}
		}
		s := h.status()
		if s.RestartsTotal != all || len(s.Restarts) != 1000 {
			t.Errorf("%d restarts, %d remembered", s.RestartsTotal, len(s.Restarts))
		}
		for i := 1; i < len(s.Restarts); i++ {
			if !s.Restarts[i-1].Before(s.Restarts[i]) {
				t.Fatalf("number %d is not older than the next", i-1)
			}
		}
	})
}
