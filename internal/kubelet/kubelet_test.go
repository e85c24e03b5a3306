package kubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/status"
)

func TestLifeOfARegistration(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	s := socket(t, r, "nfs.csi.k8s.io")
	if l := s.Look(); l.Up || l.Place != status.Missing || l.Path != filepath.Join(w.dir, "nfs.csi.k8s.io-reg.sock") {
		t.Fatalf("before: %+v", l)
	}
	publish(t, s)
	l := s.Look()
	if !l.Up || l.Place != status.Ours || !l.Announced.Equal(announcement(s.name)) || l.FolderAnew || time.Since(l.PublishedAt) > time.Second {
		t.Fatalf("published: %+v", l)
	}
	k := dialAsKubelet(t, s.Path())
	info, err := k.getInfo(t)
	if err != nil {
		t.Fatal(err)
	}
	if info.Type != registerapi.CSIPlugin || info.Name != s.name || info.Endpoint != "/run/nfs.csi.k8s.io/csi.sock" || !slices.Equal(info.SupportedVersions, []string{"1.0.0"}) {
		t.Fatalf("GetInfo tells %v", info)
	}
	<-s.Hints()
	if l := s.Look(); l.GetInfoAt.Before(l.PublishedAt) || !l.Word.At.IsZero() {
		t.Fatalf("after GetInfo: %+v", l)
	}
	k.notify(t, true, "")
	<-s.Hints()
	if l := s.Look(); !l.Word.Registered || l.Word.At.IsZero() || l.Accepted != 1 || l.Refusals != 0 {
		t.Fatalf("after Notify: %+v", l)
	}
	k.notify(t, false, "no\x1b[31m\nway")
	if l := s.Look(); l.Word.Registered || l.Word.Error != `no\x1b[31m\nway` || l.Refusals != 1 {
		t.Fatalf("after refusal: %+v", l)
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	if l := s.Look(); l.Up || l.Place != status.Missing || l.Accepted != 1 {
		t.Fatalf("withdrawn: %+v", l)
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatalf("a second time: %v", err)
	}
	if _, err := os.Stat(r.recordOf(s.name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("record: %v", err)
	}
	w.wantNoTemporary()
}

func TestPublishingAnewReplacesOurOwn(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	_, s := w.published("a", with(m, false))
	before, _ := lookAt(s.Path())
	k := dialAsKubelet(t, s.Path())
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	a := announcement("a")
	a.Endpoint = "/elsewhere"
	if err := s.Publish(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	after, _ := lookAt(s.Path())
	if before == after {
		t.Error("the kubelet needs to see another file")
	}
	mustAnswer(t, s.Path(), "/elsewhere")
	// What the kubelet still has to say to the old one is taken, and is no word on the new one.
	k.notify(t, true, "")
	if l := s.Look(); !l.Word.At.IsZero() || l.Accepted != 0 {
		t.Errorf("a word on the old socket counts for the new one: %+v", l)
	}
	if n := m.count("registration-a"); n != 1 {
		t.Errorf("%d listeners in the store", n)
	}
	w.wantNoTemporary()
}

func TestBadAnnouncementsAndNames(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	for _, name := range []string{"", "../../x", ".x", "a b", "Under_score!", strings.Repeat("a", 64), "a\nb", "a\x00"} {
		if _, err := r.Socket(name); !errors.Is(err, status.ErrName) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"Foo.Example", strings.Repeat("a", 63)} {
		s := socket(t, r, name)
		publish(t, s)
		mustAnswer(t, s.Path(), announcement(name).Endpoint)
		if _, err := r.Socket(name); err == nil {
			t.Errorf("a second Socket for %s", name)
		}
	}
	s := socket(t, r, "a")
	for _, a := range []status.Announcement{{}, announcement("b"), {Endpoint: "/x", Identity: status.Identity{Name: "a"}}} {
		if err := s.Publish(t.Context(), a); err == nil {
			t.Errorf("%+v was published", a)
		}
	}
	long, err := Open("/"+strings.Repeat("d", 80), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer long.Close(t.Context())
	if _, err := long.Socket("nfs.csi.k8s.io"); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("a path too long: %v", err)
	}
	if _, err := Open("relative", Options{}); err == nil {
		t.Error("a relative root_dir")
	}
}

// A GetInfo of another csi-registrar, or of doctor, says nothing of the kubelet.
func TestOwnClientsAreNotTheKubelet(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	name, err := ask(t.Context(), s.Path())
	if err != nil || name != "a" {
		t.Fatalf("%q, %v", name, err)
	}
	if l := s.Look(); !l.GetInfoAt.IsZero() {
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
	r, err := Open(w.root, Options{RunDir: w.run})
	if err != nil {
		t.Fatal(err)
	}
	s := socket(t, r, "a")
	publish(t, s)
	k := dialAsKubelet(t, s.Path())
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	s.saving.Lock() // the Notify is stuck in writing the record
	answered := make(chan error, 1)
	go func() {
		_, err := k.NotifyRegistrationStatus(context.Background(), &registerapi.RegistrationStatus{PluginRegistered: true})
		answered <- err
	}()
	eventually(t, "the call arrives", func() bool { return s.Look().Accepted == 1 })
	time.AfterFunc(200*time.Millisecond, s.saving.Unlock)
	if _, err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-answered; err != nil {
		t.Errorf("Notify in flight: %v", err)
	}
}

// Silent, half-open and idle connections do not hold up the end.
func TestCloseIsQuick(t *testing.T) {
	w := newWorld(t)
	r, err := Open(w.root, Options{})
	if err != nil {
		t.Fatal(err)
	}
	s := socket(t, r, "a")
	publish(t, s)
	k := dialAsKubelet(t, s.Path())
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		c, err := dial(t.Context(), ownAddress(), s.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	eventually(t, "all are accepted", func() bool { return connectionsOf(s) == 11 })
	begin := time.Now()
	if _, err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if d := time.Since(begin); d > 500*time.Millisecond {
		t.Errorf("took %v", d)
	}
}

func connectionsOf(s *Socket) int {
	cs := s.r.conns
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.of[s])
}

func TestWithdrawTakesOnlyOurs(t *testing.T) {
	for _, what := range []string{"file", "socket", "nothing"} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t)
			m := newManager(t)
			_, s := w.published("a", with(m, true))
			os.Remove(s.Path())
			switch what {
			case "file":
				os.WriteFile(s.Path(), []byte("mine"), 0o600)
			case "socket":
				listen(t, s.Path())
			}
			before, berr := lookAt(s.Path())
			if err := s.Withdraw(t.Context()); err != nil {
				t.Fatal(err)
			}
			if after, err := lookAt(s.Path()); before != after || (err == nil) != (berr == nil) {
				t.Errorf("touched: %+v %v", after, err)
			}
			if m.count("registration-a") != 0 || s.Look().Up {
				t.Error("not withdrawn")
			}
		})
	}
}

// deaf is a store that does not listen while fail is set.
type deaf struct {
	*manager
	fail error
}

func (d *deaf) Forget(ctx context.Context, name string) error {
	if d.fail != nil {
		return d.fail
	}
	return d.manager.Forget(ctx, name)
}

// watches counts those that are not closed.
type watches struct {
	Watch
	open *int
}

func (w watches) Close() { *w.open--; w.Watch.Close() }

// What the store or the record keeps of a withdrawn socket goes with the next change, of
// whatever kind, and the name is free after Close.
func TestWithdrawIsTriedAgain(t *testing.T) {
	for _, trouble := range []string{"store", "record"} {
		for _, next := range []string{"withdraw", "publish", "close", "close in vain"} {
			t.Run(trouble+", "+next, func(t *testing.T) {
				w := newWorld(t)
				d := &deaf{manager: newManager(t)}
				open := 0
				r, s := w.published("a", with(d, true), func(o *Options) {
					o.Watch = func(path string) Watch { open++; return watches{newUnwatched(path), &open} }
				})
				rec := r.recordOf("a")
				if trouble == "store" {
					d.fail = errors.New("no manager")
				} else if err := errors.Join(os.Remove(rec), os.MkdirAll(rec+"/x", 0o700)); err != nil {
					t.Fatal(err)
				}
				if err := s.Withdraw(t.Context()); err == nil {
					t.Fatal("withdrawn")
				}
				if err := s.Withdraw(t.Context()); err == nil {
					t.Fatal("the second time it was forgotten")
				}
				if l := s.Look(); l.Up || l.Place != status.Missing {
					t.Errorf("%+v", l)
				}
				if next != "close in vain" {
					d.fail = nil
					if trouble == "record" {
						os.RemoveAll(rec)
					}
				}
				switch next {
				case "withdraw":
					if err := s.Withdraw(t.Context()); err != nil {
						t.Error(err)
					}
				case "publish":
					publish(t, s)
					if n := d.count("registration-a"); n != 1 || r.readRecord("a").Path != s.Path() {
						t.Errorf("%d in the store, record %+v", n, r.readRecord("a"))
					}
					if err := s.Withdraw(t.Context()); err != nil {
						t.Error(err)
					}
				}
				if kept, err := s.Close(t.Context()); kept || (err == nil) == (next == "close in vain") {
					t.Errorf("kept %t, %v", kept, err)
				}
				if open != 0 {
					t.Errorf("%d watches are open", open)
				}
				d.fail = nil
				os.RemoveAll(rec + "/x")
				if next != "close in vain" {
					if _, err := os.Lstat(rec); err == nil || d.count("registration-a") != 0 {
						t.Error("not all is gone")
					}
				}
				publish(t, socket(t, r, "a"))
			})
		}
	}
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
			if got := s.NotKept(); (got != nil) != (c.fail != nil) {
				t.Errorf("NotKept: %v", got)
			}
			kept, err := s.Close(t.Context())
			if err != nil || kept != c.want {
				t.Fatalf("kept %t, %v", kept, err)
			}
			_, perr := os.Stat(s.Path())
			_, rerr := os.Stat(r.recordOf("a"))
			if (perr == nil) != c.want || (rerr == nil) != c.want || (m.count("registration-a") == 1) != c.want {
				t.Errorf("path %v, record %v, store %d", perr, rerr, m.count("registration-a"))
			}
			if c.want { // who connects now waits for the next process
				conn, err := dial(t.Context(), ownAddress(), s.Path())
				if err != nil {
					t.Fatal(err)
				}
				conn.Close()
			}
		})
	}
}
