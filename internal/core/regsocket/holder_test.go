package regsocket

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// other is a registrar that holds the path of a driver, for virtual time.
type other struct {
	info pluginreg.Info
	cred unixsock.Cred
	made int64 // when the socket was made
	err  error // of GetInfo
}

// heldSocket returns the Socket of driver a, whose path o holds.
func heldSocket(o *other) *Socket {
	host := newHost()
	host.Lstat = func(string) (unixsock.File, error) { return unixsock.File{FileID: unixsock.FileID{Born: o.made}}, nil }
	host.Vacate = func(context.Context, string) (bool, error) {
		return false, &unixsock.InUse{Path: "/reg/a-reg.sock", Holder: o.cred.String(), Live: true}
	}
	host.GetInfo = func(context.Context, string) (pluginreg.Info, unixsock.Cred, error) { return o.info, o.cred, o.err }
	return &Socket{r: &Registry{o: Options{Host: host}}, name: "a", path: "/reg/a-reg.sock", log: slog.New(slog.DiscardHandler)}
}

// The driver counts as served by another registrar if the same process of root has held the path
// for 15 s and gives the answer that we would give.
func TestServedByAnother(t *testing.T) {
	sidecar := other{
		info: pluginreg.Info{Type: registerapi.CSIPlugin, Name: "a", Endpoint: "/run/a/csi.sock"},
		cred: unixsock.Cred{PID: 7}, made: 1000,
	}
	for _, c := range []struct {
		name   string
		after  time.Duration // from the first question to the last one
		change func(*other)  // meanwhile; if early, before the first question
		served bool
		early  bool
	}{
		{"15 s", 15 * time.Second, nil, true, false},
		{"less than 15 s", 15*time.Second - time.Millisecond, nil, false, false},
		{"the endpoint is written otherwise", time.Minute, func(o *other) { o.info.Endpoint = "/run/a//csi.sock" }, true, false},
		{"another endpoint", time.Minute, func(o *other) { o.info.Endpoint = "/run/b/csi.sock" }, false, false},
		{"another driver", time.Minute, func(o *other) { o.info.Name = "b" }, false, false},
		{"not a CSI driver", time.Minute, func(o *other) { o.info.Type = registerapi.DRAPlugin }, false, false},
		{"no answer", time.Minute, func(o *other) { o.info, o.err = pluginreg.Info{}, context.DeadlineExceeded }, false, false},
		{"not root", time.Minute, func(o *other) { o.cred.UID = 1000 }, false, false},
		{"another process", time.Minute, func(o *other) { o.cred.PID = 8 }, false, false},
		{"another socket", time.Minute, func(o *other) { o.made++ }, false, false},
		{"not visible", time.Minute, func(o *other) { o.cred.PID = 0 }, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := sidecar
				if c.early {
					c.change(&o)
				}
				s := heldSocket(&o)
				wantConflict(t, s.clear(t.Context(), announcement("a")), "which is left alone")
				first := time.Now()
				time.Sleep(c.after)
				if c.change != nil {
					c.change(&o)
				}
				err := s.clear(t.Context(), announcement("a"))
				got, want := s.Look().ServedBy, status.ServedBy{}
				if c.served {
					wantConflict(t, err, "serves the driver to the kubelet")
					want = status.ServedBy{PID: 7, Since: first, AskedAt: time.Now()}
				} else {
					wantConflict(t, err, "which is left alone")
				}
				if got != want {
					t.Errorf("served by %+v, want %+v", got, want)
				}
				// The path is free.
				s.r.o.Host.Vacate = func(context.Context, string) (bool, error) { return false, nil }
				if err := s.clear(t.Context(), announcement("a")); err != nil || s.Look().ServedBy != (status.ServedBy{}) || s.holder.pid != 0 {
					t.Errorf("afterwards served by %+v, %v", s.Look().ServedBy, err)
				}
			})
		})
	}
}

// A file is in the place of the sidecar's socket.
func TestServedByNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := other{info: pluginreg.Info{Type: registerapi.CSIPlugin, Name: "a", Endpoint: "/run/a/csi.sock"}, cred: unixsock.Cred{PID: 7}, made: 1}
		s := heldSocket(&o)
		_ = s.clear(t.Context(), announcement("a"))
		time.Sleep(time.Minute)
		wantConflict(t, s.clear(t.Context(), announcement("a")), "serves the driver")
		s.r.o.Host.Vacate = func(context.Context, string) (bool, error) {
			return false, &unixsock.InUse{Holder: "a file"}
		}
		wantConflict(t, s.clear(t.Context(), announcement("a")), "is held by a file")
		if by := s.Look().ServedBy; by.PID != 0 {
			t.Errorf("served by %+v", by)
		}
	})
}

// With real sockets and processes: a sidecar has the path of the driver.
func TestServedByASidecar(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	served := func() status.ServedBy {
		wantConflict(t, s.Publish(t.Context(), announcement("a")), "")
		return s.Look().ServedBy
	}
	t.Run("it serves", func(t *testing.T) {
		serveSidecar(t, s.path, registerapi.CSIPlugin, "a", func(sc *sidecar) { sc.info.Endpoint = announcement("a").Endpoint })
		if by := served(); by.PID != 0 {
			t.Errorf("at once: %+v", by)
		}
		s.holder.since = s.holder.since.Add(-15 * time.Second) // as if that time had passed
		if by := served(); by.PID != os.Getpid() || by.AskedAt.Sub(by.Since) < 15*time.Second {
			t.Errorf("after 15 s: %+v", by)
		}
	})
	publish(t, s) // its socket is stale
	if by := s.Look().ServedBy; by.PID != 0 {
		t.Errorf("after its end: %+v", by)
	}
}

// Two processes of csi-registrar for a driver: the one with a descriptor store has the path, the
// other one waits until it is free.
func TestTheOneWithTheStoreHasThePath(t *testing.T) {
	for _, first := range []string{"the sidecar", "the daemon"} {
		t.Run(first+" is first", func(t *testing.T) {
			w := newWorld(t)
			m := newManager(t)
			daemon := socket(t, w.open(with(m, true)), "a")
			other := socket(t, w.open(func(o *Options) { o.RunDir = "" }), "a")
			if first == "the sidecar" {
				publish(t, other)
				mustAnswer(t, other.path, announcement("a").Endpoint)
				publish(t, daemon)
				wantPlace(t, other, status.Foreign)
			} else {
				publish(t, daemon)
			}
			for range 2 {
				wantConflict(t, other.Publish(t.Context(), announcement("a")), "descriptor store")
				if !other.Look().Yields {
					t.Error("it does not know that it waits")
				}
			}
			wantPlace(t, daemon, status.Ours)
			mustAnswer(t, daemon.path, announcement("a").Endpoint)
			if err := daemon.Withdraw(t.Context()); err != nil {
				t.Fatal(err)
			}
			publish(t, other)
			wantPlace(t, other, status.Ours)
			if other.Look().Yields {
				t.Error("it waits although it has the path")
			}
		})
	}
}

// A daemon without a store takes no path, and no path is taken from one that is not root, has a
// store or is another driver's.
func TestNothingIsTakenFromOthers(t *testing.T) {
	for _, c := range []struct {
		name        string
		store       string
		keeps, take bool
		change      func(*other)
	}{
		{"sidecar mode and daemon", pluginreg.NoStore, true, true, func(*other) {}},
		{"two without a store", pluginreg.NoStore, false, false, func(*other) {}},
		{"two with a store", pluginreg.HasStore, true, false, func(*other) {}},
		{"node-driver-registrar", "", true, false, func(*other) {}},
		{"not root", pluginreg.NoStore, true, false, func(o *other) { o.cred.UID = 1000 }},
		{"another driver", pluginreg.NoStore, true, false, func(o *other) { o.info.Name = "b" }},
		{"no answer", pluginreg.NoStore, true, false, func(o *other) { o.err = context.DeadlineExceeded }},
		{"twice the header", pluginreg.NoStore + "," + pluginreg.NoStore, true, false, func(*other) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := other{info: pluginreg.Info{Type: registerapi.CSIPlugin, Name: "a", Endpoint: "/run/a/csi.sock", Store: c.store}, cred: unixsock.Cred{PID: 7}, made: 1}
			c.change(&o)
			s := heldSocket(&o)
			s.r.o.KeepSockets = c.keeps
			removed := false
			s.r.o.Host.RemoveFile = func(string, unixsock.FileID) (bool, error) { removed = true; return true, nil }
			if err := s.clear(t.Context(), announcement("a")); (err == nil) != c.take || removed != c.take {
				t.Errorf("removed %t, error %v", removed, err)
			}
			if s.Look().Yields { // a daemon with a store waits for nobody
				t.Error("it yields")
			}
			s.r.o.Host.RemoveFile = func(string, unixsock.FileID) (bool, error) { return false, errors.New("read-only") }
			if err := s.clear(t.Context(), announcement("a")); c.take && (isConflict(err) || err == nil || !strings.Contains(err.Error(), "read-only")) {
				t.Errorf("cannot be removed: %v", err)
			}
		})
	}
}

// While the daemon restarts nobody answers at its path, and the other one still waits.
func TestYieldsWhileTheDaemonRestarts(t *testing.T) {
	o := other{info: pluginreg.Info{Type: registerapi.CSIPlugin, Name: "a", Store: pluginreg.HasStore}, cred: unixsock.Cred{PID: 7}, made: 1}
	s := heldSocket(&o)
	yields := func(err error, file int64) bool {
		o.err = err
		s.r.o.Host.Lstat = func(string) (unixsock.File, error) { return unixsock.File{FileID: unixsock.FileID{Born: file}}, nil }
		wantConflict(t, s.clear(t.Context(), announcement("a")), "")
		return s.Look().Yields
	}
	if !yields(nil, 1) || !yields(context.DeadlineExceeded, 1) || yields(net.ErrClosed, 2) {
		t.Error("it does not wait, or waits for another socket")
	}
}
