package agent

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/test/fake"
)

// TestDisabledDriverIsWithdrawn checks a driver whose table stays, with enabled = false.
func TestDisabledDriverIsWithdrawn(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		d := drv("a")
		apply(t, a, conf("/k", d))
		d.Enabled = false
		apply(t, a, conf("/k", d))
		want(t, states(a), "a disabled")
		if got := n.socket("/k/plugins_registry/a").counts(); got != [3]int{1, 1, 1} {
			t.Errorf("published, withdrawn, closed %v", got)
		}
	})
}

// TestReasonOfAKeptTable checks that the status says which driver has no table, and why it stays.
func TestReasonOfAKeptTable(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, _ *node) {
		kept := drv("a")
		kept.KeptFor = "1 volume in use"
		apply(t, a, conf("/k", kept, drv("b")))
		for name, why := range map[string]string{"a": kept.KeptFor, "b": ""} {
			if d, _ := a.Status().Driver(name); d.NoTable != (why != "") || d.Reason != why {
				t.Errorf("%s: no table %t, reason %q", name, d.NoTable, d.Reason)
			}
		}
	})
}

// TestRepeatedErrorIsLoggedOnce checks that a registrar that cannot be started for an hour does not
// fill the log.
func TestRepeatedErrorIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log fake.Buffer
		a := New(slog.New(slog.NewTextHandler(&log, nil)), &node{sockets: map[string]*socket{}, broken: "a"}, "test")
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = a.Run(ctx) })
		if err := a.Apply(ctx, conf("/k", drv("a")), nil); err == nil {
			t.Error("no error")
		}
		time.Sleep(time.Hour)
		cancel()
		running.Wait()
		if n := strings.Count(log.String(), "not all registrars have started"); n != 1 {
			t.Errorf("logged %d times", n)
		}
	})
}
