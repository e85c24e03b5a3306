package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
)

// slowNode makes its sockets slowly.
type slowNode struct {
	*node
	making, release chan struct{}
}

func (n *slowNode) Socket(ctx context.Context, name string) (Socket, error) {
	n.making <- struct{}{}
	<-n.release
	return n.node.Socket(ctx, name)
}

// TestStopDuringApply checks that an Apply that runs when the agent is stopped starts its
// registrars, which then end, and that one after that starts none and closes what it opened.
func TestStopDuringApply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &slowNode{&node{sockets: map[string]*socket{}}, make(chan struct{}, 1), make(chan struct{})}
		a := New(slog.New(slog.DiscardHandler), n, "test")
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := a.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		c := config.Default()
		c.Drivers = []config.Driver{config.DefaultDriver("a.example", "/a")}
		applied := make(chan error)
		go func() { applied <- a.Apply(t.Context(), c, nil) }()
		<-n.making
		stop()
		synctest.Wait()
		close(n.release)
		if err := <-applied; err != nil {
			t.Errorf("the Apply that ran: %v", err)
		}
		running.Wait()
		const path = "/k/plugins_registry/a.example"
		if s := n.socket(path); s == nil || s.counts()[2] != 1 {
			t.Errorf("the socket was not closed: %+v", s)
		}
		if err := a.Apply(t.Context(), c, nil); err == nil || !strings.Contains(err.Error(), "the agent has ended") {
			t.Errorf("the Apply after the end: %v", err)
		}
		if s := n.socket(path); s == nil || s.counts()[2] != 1 {
			t.Errorf("what was opened after the end is not closed: %+v", s)
		}
	})
}

// TestFilesOfTheConfiguration checks that the status names the files of the configuration in force,
// whatever the caller does with its list afterwards.
func TestFilesOfTheConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(slog.New(slog.DiscardHandler), &node{sockets: map[string]*socket{}}, "test")
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = a.Run(ctx) }) // it returns nil
		files := []string{"first", "second"}
		if err := a.Apply(t.Context(), config.Default(), files); err != nil {
			t.Error(err)
		}
		files[0] = "changed"
		if got := a.Status().ConfigFiles; !slices.Equal(got, []safetext.Claim{"first", "second"}) {
			t.Errorf("%q", got)
		}
		stop()
		running.Wait()
	})
}

// TestKeptTableIsNoChange checks that a driver that stays in force without a table is not
// registered again for it, although the kubelet refused it.
func TestKeptTableIsNoChange(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		d := drv("a")
		apply(t, a, conf("/k", d))
		s := n.socket("/k/plugins_registry/a")
		s.mu.Lock()
		s.up.Notification.Registered = false
		s.mu.Unlock()
		s.hints <- struct{}{}
		synctest.Wait()
		d.KeptFor = "1 volume in use"
		apply(t, a, conf("/k", d))
		if got := s.counts(); got[0] != 1 {
			t.Errorf("published %d times", got[0])
		}
		d.SupportedVersions = []string{"1.2.0"} // a change, after which it is tried again
		apply(t, a, conf("/k", d))
		if got := s.counts(); got[0] != 2 {
			t.Errorf("published %d times after a change", got[0])
		}
	})
}

// TestWithdrawalsThatGoOn checks that the error names three of them, and says if there are more.
func TestWithdrawalsThatGoOn(t *testing.T) {
	for names, want := range map[string]string{"a b c": "3 withdrawals go on: a, b, c (busy)", "a b c d": "4 withdrawals go on: a, b, c, and 1 more (busy)"} {
		with(t, func(t *testing.T, a *Agent, n *node) {
			var all []config.Driver
			for name := range strings.FieldsSeq(names) {
				all = append(all, drv(name))
			}
			apply(t, a, conf("/k", all...))
			for _, d := range all {
				n.socket("/k/plugins_registry/" + d.Name).refuse(errors.New("busy"))
			}
			if err := a.Apply(t.Context(), conf("/k"), nil); err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
			for _, d := range all {
				n.socket("/k/plugins_registry/" + d.Name).refuse(nil)
			}
			time.Sleep(time.Minute)
		})
	}
}
