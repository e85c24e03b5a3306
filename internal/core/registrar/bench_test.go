package registrar

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/status"
)

// registeredWorld is one in which all is well.
func registeredWorld() *world {
	w := readyWorld()
	w.sock = status.Socket{
		Path: w.sock.Path, Place: status.Ours, Up: true, Accepted: 1,
		Publication: status.Publication{
			PublishedAt: time.Now(), GetInfoAt: time.Now(),
			Announced:    status.Announcement{Identity: ready().Identity, Endpoint: base.Endpoint, Versions: base.SupportedVersions},
			Notification: status.Notification{At: time.Now(), Registered: true},
		},
	}
	return w
}

// BenchmarkStep is what a hint costs when all is well: a look at everything, a decision, and
// the finding that nothing is new.
func BenchmarkStep(b *testing.B) {
	w := registeredWorld()
	r := New(base, driver.Observe(w), fakeSocket{w}, slog.New(slog.DiscardHandler), func(status.Driver) {})
	defer r.driver.Close()
	r.step(b.Context(), time.Now()) // asks
	<-r.driver.Hints()
	now := time.Now()
	r.finished(<-r.task.done, now)
	b.ReportAllocs()
	for b.Loop() {
		if next := r.step(b.Context(), now); !next.IsZero() || r.task.busy || r.status.State != "registered" {
			b.Fatalf("there is something to do: %+v", r.status)
		}
	}
}

// counting counts how often a registrar looked, which it does each time that it wakes.
type counting struct {
	fakeSocket
	looks *int
}

func (c counting) Look() status.Socket { *c.looks++; return c.fakeSocket.Look() }

// A registered driver costs nothing while nothing happens: no timer of its registrar is alive.
func TestNoTimerWhenRegistered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := registeredWorld()
		looks := 0
		r := New(base, driver.Observe(w), counting{fakeSocket{w}, &looks}, slog.New(slog.DiscardHandler), func(status.Driver) {})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		defer func() { cancel(); <-done }()
		time.Sleep(time.Minute)
		synctest.Wait()
		before := looks
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if looks != before {
			t.Errorf("woke %d times in a day without any hint", looks-before)
		}
		poke(w.hints) // it does wake for one
		synctest.Wait()
		if looks == before {
			t.Error("a hint does not wake it")
		}
	})
}
