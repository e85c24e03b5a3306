package rate

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		if !Pause(t.Context(), time.Second) || time.Since(begun) != time.Second {
			t.Errorf("a pause of a second took %s", time.Since(begun))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if Pause(ctx, time.Minute) || time.Since(begun) != 2*time.Second {
			t.Errorf("interrupted after a second, it took %s", time.Since(begun)-time.Second)
		}
	})
}

func TestBucket(t *testing.T) {
	now := time.Unix(1000, 0)
	b := Bucket{Burst: 3, Interval: time.Second}
	for i := range 3 {
		if !b.Allow(now) {
			t.Fatalf("event %d of the burst is not allowed", i)
		}
	}
	if next := b.Next(now); b.Allow(now) || next != now.Add(time.Second) {
		t.Errorf("after the burst the next event is allowed at %s", next)
	}
	if now = now.Add(time.Second - 1); b.Allow(now) {
		t.Error("allowed before the interval is over")
	}
	if now = now.Add(1); !b.Allow(now) || b.Allow(now) {
		t.Error("not one event in an interval")
	}
	b.Take(now) // beyond what is allowed: the next ones wait longer
	if next := b.Next(now); next != now.Add(2*time.Second) {
		t.Errorf("the next event is allowed at %s", next)
	}
	now = now.Add(time.Hour)
	for i := range 3 {
		if !b.Allow(now) {
			t.Errorf("event %d is not allowed after an hour", i)
		}
	}
	if b.Allow(now) {
		t.Error("an hour without events allows more than the burst")
	}
}
