package regsocket

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

func TestLifeOfARegistration(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	s := socket(t, r, "nfs.csi.k8s.io")
	if l := look(t, s); l.Up || l.Place != status.Missing || l.Path != filepath.Join(w.dir, "nfs.csi.k8s.io-reg.sock") {
		t.Fatalf("before: %+v", l)
	}
	publish(t, s)
	l := look(t, s)
	if !l.Up || l.Place != status.Ours || !sameAnnouncement(l.Announced, announcement(s.name)) || l.DirRecreated || time.Since(l.PublishedAt) > time.Minute {
		t.Fatalf("published: %+v", l)
	}
	k := dialAsKubelet(t, s.path)
	info, err := k.getInfo(t)
	if err != nil {
		t.Fatal(err)
	}
	if info.Type != registerapi.CSIPlugin || info.Name != s.name || info.Endpoint != "/run/nfs.csi.k8s.io/csi.sock" || !slices.Equal(info.SupportedVersions, []string{"1.0.0"}) {
		t.Fatalf("GetInfo tells %v", info)
	}
	<-s.Hints()
	if l := look(t, s); l.GetInfoAt.Before(l.PublishedAt) || !l.Notification.At.IsZero() {
		t.Fatalf("after GetInfo: %+v", l)
	}
	k.notify(t, true, "")
	<-s.Hints()
	if l := look(t, s); !l.Notification.Registered || l.Notification.At.IsZero() || l.Accepted != 1 || l.Refusals != 0 {
		t.Fatalf("after Notify: %+v", l)
	}
	k.notify(t, false, "no\x1b[31m\nway")
	if l := look(t, s); l.Notification.Registered || l.Notification.Error != `no\x1b[31m\nway` || l.Refusals != 1 {
		t.Fatalf("after refusal: %+v", l)
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := look(t, s); l.Up || l.Place != status.Missing || l.Accepted != 1 {
		t.Fatalf("withdrawn: %+v", l)
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatalf("a second time: %v", err)
	}
	if _, err := os.Stat(r.recordOf(s.name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("record: %v", err)
	}
}

func TestPublishingAnewReplacesOurOwn(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	_, s := w.published("a", with(m, false))
	before, _ := unixsock.Lstat(s.path)
	k := dialAsKubelet(t, s.path)
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	a := announcement("a")
	a.Endpoint = "/elsewhere"
	if err := s.Publish(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	after, _ := unixsock.Lstat(s.path)
	if before == after {
		t.Error("the kubelet needs to see another file")
	}
	mustAnswer(t, s.path, "/elsewhere")
	// The kubelet's result for the old socket is accepted, and does not count for the new one.
	k.notify(t, true, "")
	if l := look(t, s); !l.Notification.At.IsZero() || l.Accepted != 0 {
		t.Errorf("a word on the old socket counts for the new one: %+v", l)
	}
	if n := m.count("registration-a"); n != 1 {
		t.Errorf("%d listeners in the store", n)
	}
}

func TestBadAnnouncementsAndNames(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	for _, name := range []string{"", "../../x", ".x", "a b", "Under_score!", strings.Repeat("a", 64), "a\nb", "a\x00"} {
		if _, err := r.Socket(name); !errors.Is(err, csiname.ErrName) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"Foo.Example", strings.Repeat("a", 63)} {
		s := socket(t, r, name)
		publish(t, s)
		mustAnswer(t, s.path, announcement(name).Endpoint)
		if _, err := r.Socket(name); err == nil {
			t.Errorf("a second Socket for %s", name)
		}
	}
	s := socket(t, r, "a")
	for _, a := range []status.Announcement{{}, announcement("b")} {
		if err := s.Publish(t.Context(), a); err == nil {
			t.Errorf("%+v was published", a)
		}
	}
	long, err := Open("/"+strings.Repeat("d", 80), options())
	if err != nil {
		t.Fatal(err)
	}
	defer long.Close(t.Context())
	if _, err := long.Socket("nfs.csi.k8s.io"); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("a path too long: %v", err)
	}
	if _, err := Open("relative", options()); err == nil {
		t.Error("a relative root_dir")
	}
}

// A GetInfo from another csi-registrar, or from doctor, is not the kubelet's.
func TestOwnClientsAreNotTheKubelet(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	info, _, err := pluginreg.GetInfo(t.Context(), s.path)
	if err != nil || info.Name != "a" {
		t.Fatalf("%+v, %v", info, err)
	}
	if l := look(t, s); !l.GetInfoAt.IsZero() {
		t.Error("counted as the kubelet's GetInfo")
	}
	select {
	case <-s.Hints():
		t.Error("hinted")
	default:
	}
}

func TestCloseAnswersWhatIsInFlight(t *testing.T) {
	w := newWorld(t)
	r, err := Open(w.root, withRun(w))
	if err != nil {
		t.Fatal(err)
	}
	s := socket(t, r, "a")
	publish(t, s)
	k := dialAsKubelet(t, s.path)
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	look(t, s)      // that it asked is written
	s.saving.Lock() // the Notify is stuck in writing the record
	answered := make(chan error, 1)
	go func() {
		_, err := k.NotifyRegistrationStatus(context.Background(), &registerapi.RegistrationStatus{PluginRegistered: true})
		answered <- err
	}()
	eventually(t, "the call arrives", func() bool { return look(t, s).Accepted == 1 })
	time.AfterFunc(200*time.Millisecond, s.saving.Unlock)
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
	r.Close(t.Context())
	if err := <-answered; err != nil {
		t.Errorf("Notify in flight: %v", err)
	}
}

// Silent and idle connections do not delay the end beyond the time for calls.
func TestCloseIsQuick(t *testing.T) {
	w := newWorld(t)
	r, err := Open(w.root, options())
	if err != nil {
		t.Fatal(err)
	}
	s := socket(t, r, "a")
	publish(t, s)
	k := dialAsKubelet(t, s.path)
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		c, err := unixsock.Dial(t.Context(), s.path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	eventually(t, "all are accepted", func() bool { return connectionsOf(s) == 11 })
	begin := time.Now()
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
	r.Close(t.Context())
	if d := time.Since(begin); d >= 2*closeGrace {
		t.Errorf("took %v", d)
	}
}

func connectionsOf(s *Socket) int {
	cs := s.r.callers
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.open[s])
}

func TestWithdrawTakesOnlyOurs(t *testing.T) {
	for _, what := range []string{"file", "socket", "nothing"} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t)
			m := newManager(t)
			_, s := w.published("a", with(m, true))
			os.Remove(s.path)
			switch what {
			case "file":
				os.WriteFile(s.path, []byte("mine"), 0o600)
			case "socket":
				listen(t, s.path)
			}
			before, berr := unixsock.Lstat(s.path)
			if err := s.Withdraw(t.Context()); err != nil {
				t.Fatal(err)
			}
			if after, err := unixsock.Lstat(s.path); before != after || (err == nil) != (berr == nil) {
				t.Errorf("touched: %+v %v", after, err)
			}
			if m.count("registration-a") != 0 || look(t, s).Up {
				t.Error("not withdrawn")
			}
		})
	}
}

// watches counts those that are not closed.
type watches struct {
	rate.Hinter
	open *int
}

func (w watches) Close() { *w.open--; w.Hinter.Close() }

// A withdrawn socket that is still in the store or in a record is not adopted by another process,
// and its name is free after Close.
func TestWithdrawnWhateverStoreAndRecordSay(t *testing.T) {
	for _, trouble := range []string{"store", "record"} {
		t.Run(trouble, func(t *testing.T) {
			w := newWorld(t)
			m := newManager(t)
			f := &forgetful{manager: m}
			open := 0
			r, s := w.published("a", with(f, true), func(o *Options) {
				o.Watch = func(...string) rate.Hinter { open++; return watches{make(hints, 1), &open} }
			})
			rec := r.recordOf("a")
			if trouble == "store" {
				f.fail = errors.New("no manager")
			} else if err := errors.Join(os.Remove(rec), os.MkdirAll(rec+"/x", 0o700)); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := s.Withdraw(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if l := s.Look(); l.Up || l.Place != status.Missing {
				t.Errorf("%+v", l)
			}
			if n := strings.Count(w.log.String(), "level=WARN"); n != 1 {
				t.Errorf("%d warnings:\n%s", n, w.log)
			}
			if err := s.Close(t.Context(), false); err != nil {
				t.Error(err)
			}
			if open != 0 {
				t.Errorf("%d watches are open", open)
			}
			next := socket(t, w.open(with(m, true)), "a")
			if err := next.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil || w.cannotAdopt() == (trouble == "record") {
				t.Error(err)
			}
			if next.Look().Up || m.count("registration-a") != 0 {
				t.Error("what was withdrawn is back")
			}
			os.RemoveAll(rec)
			f.fail = nil
			publish(t, socket(t, r, "a"))
			if m.count("registration-a") != 1 || recorded(r, "a").Path != s.path {
				t.Error("not stored and recorded")
			}
		})
	}
}

// forgetful is a store whose Forget fails.
type forgetful struct {
	*manager
	fail error
}

func (f *forgetful) Forget(ctx context.Context, name string) error {
	if f.fail != nil {
		return f.fail
	}
	return f.manager.Forget(ctx, name)
}

func TestCloseKeepsOnlyWhatIsStored(t *testing.T) {
	for _, c := range []struct {
		name        string
		keep, store bool
		fail        error
		want        bool
	}{
		{"kept", true, true, nil, true},
		{"not asked to", false, true, nil, false},
		{"no store", true, false, nil, false},
		{"store full", true, true, errors.New("full"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			m := newManager(t)
			m.fail = c.fail
			var st Store
			if c.store {
				st = m
			}
			r, s := w.published("a", with(st, c.keep))
			if got := s.Look().NotKept; c.fail == nil && got != "" || c.fail != nil && got != c.fail.Error() {
				t.Errorf("NotKept: %q", got)
			}
			if err := s.Close(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			_, perr := os.Stat(s.path)
			_, rerr := os.Stat(r.recordOf("a"))
			if (perr == nil) != c.want || (rerr == nil) != c.want || (m.count("registration-a") == 1) != c.want {
				t.Errorf("path %v, record %v, store %d", perr, rerr, m.count("registration-a"))
			}
			if c.want { // who connects now waits for the next process
				conn, err := unixsock.Dial(t.Context(), s.path)
				if err != nil {
					t.Fatal(err)
				}
				conn.Close()
			}
		})
	}
}

// The daemon ends while the kubelet asks the driver, and the kubelet's notification is lost. The
// next process knows that the kubelet had asked; otherwise it would wait for ever.
func TestGetInfoIsKnownToTheNextProcess(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	r, s := w.published("a", with(m, true))
	if _, err := dialAsKubelet(t, s.path).getInfo(t); err != nil {
		t.Fatal(err)
	}
	asked := look(t, s).GetInfoAt // it has Check called, as the hint does
	if rec := recorded(r, "a"); asked.IsZero() || !rec.GetInfoAt.Round(0).Equal(asked.Round(0)) {
		t.Errorf("record: asked %v, want %v", rec.GetInfoAt, asked)
	}
}

// After an error of the file system the path is examined again without a hint from elsewhere.
func TestAFailedCheckIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fail := true
		o := options()
		o.Host = newHost()
		o.Host.Lstat = func(path string) (unixsock.File, error) {
			if fail {
				return unixsock.File{}, syscall.EIO
			}
			return unixsock.Lstat(path)
		}
		r, err := Open(fake.ShortDir(t), o)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close(t.Context())
		s := socket(t, r, "a")
		defer s.Close(t.Context(), false)
		if err := s.Check(t.Context()); !errors.Is(err, syscall.EIO) {
			t.Fatalf("error is %v", err)
		}
		fail = false
		select {
		case <-s.Hints():
		case <-time.After(time.Minute):
			t.Fatal("no hint")
		}
		if err := s.Check(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case <-s.Hints():
			t.Error("another hint after a success")
		case <-time.After(time.Minute):
		}
	})
}
