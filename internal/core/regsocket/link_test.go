package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
)

// linked returns an announcement with a link.
func (w *world) linked(name string) status.Announcement {
	a := announcement(name)
	a.LinkTarget, a.Endpoint = a.Endpoint, rootdir.EndpointLink(w.root, name)
	return a
}

// wantLink checks where a driver's link points to; empty: it must not exist.
func (w *world) wantLink(name, target string) {
	w.t.Helper()
	got, err := os.Readlink(rootdir.EndpointLink(w.root, name))
	if got != target || target == "" && !errors.Is(err, os.ErrNotExist) {
		w.t.Errorf("the link points to %q (%v), want %q", got, err, target)
	}
}

// The link exists before the kubelet can ask for it, is restored during the registration, and is
// removed with it.
func TestLinkStandsWithTheRegistration(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	a := w.linked("a")
	if err := s.Publish(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	w.wantLink("a", "/run/a/csi.sock")
	mustAnswer(t, s.path, rootdir.EndpointLink(w.root, "a"))
	for i, spoil := range []func(link string) error{
		os.Remove,
		func(link string) error { return os.RemoveAll(filepath.Dir(link)) },
		func(link string) error { return errors.Join(os.Remove(link), os.Symlink("/elsewhere", link)) },
	} {
		if err := spoil(rootdir.EndpointLink(w.root, "a")); err != nil {
			t.Fatal(err)
		}
		if now := look(t, s); now.LinkError != "" {
			t.Error(now.LinkError)
		}
		if i < 2 { // restored at once, it would be in the way of rm -rf
			w.wantLink("a", "")
		}
		for _, err := os.Lstat(a.Endpoint); err != nil; _, err = os.Lstat(a.Endpoint) {
			select {
			case <-s.Hints():
				look(t, s)
			case <-time.After(time.Minute):
				t.Fatal("no hint")
			}
		}
		w.wantLink("a", "/run/a/csi.sock")
	}
	a.LinkTarget = "/run/b/csi.sock"
	before := s.Look().PublishedAt
	if err := s.Acknowledge(t.Context(), a); err != nil || !s.Look().PublishedAt.Equal(before) {
		t.Errorf("another target: %v", err)
	}
	w.wantLink("a", "/run/b/csi.sock")
	if err := s.Publish(t.Context(), announcement("a")); err != nil {
		t.Fatal(err)
	}
	w.wantLink("a", "")
	if err := s.Publish(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.wantLink("a", "")
}

func TestLinkWhosePathIsTaken(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	link := rootdir.EndpointLink(w.root, "a")
	if err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o750), os.WriteFile(link, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	err := s.Publish(t.Context(), w.linked("a"))
	if err == nil || !strings.Contains(err.Error(), "is a regular file: move it away") || s.Look().Up {
		t.Errorf("published: %t, %v", s.Look().Up, err)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := s.Publish(t.Context(), w.linked("a")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(link), os.Mkdir(link, 0o700)); err != nil {
		t.Fatal(err)
	}
	if now := look(t, s); !strings.Contains(now.LinkError, "is a directory: move it away") || now.Place != status.Ours {
		t.Errorf("%+v", now)
	}
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if now := look(t, s); now.LinkError != "" {
		t.Error(now.LinkError)
	}
}

// The next process points the link to the driver, whatever a recorder left, and it is removed when
// the unit stops.
func TestLinkOverARestart(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	s := socket(t, w.open(with(m, true)), "a")
	if err := s.Publish(t.Context(), w.linked("a")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.wantLink("a", "/run/a/csi.sock")
	if err := newHost().pointLink(rootdir.EndpointLink(w.root, "a"), "/run/recorder", true); err != nil {
		t.Fatal(err)
	}
	next := socket(t, w.open(with(m, true)), "a")
	if err := next.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
		t.Fatal(err)
	}
	w.wantLink("a", "/run/a/csi.sock")
	if err := next.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	left, err := Recorded(w.run)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := left.Remove(); err != nil {
		t.Fatal(err)
	}
	w.wantLink("a", "")
}

// A link that cannot be removed with its registration is removed when that is tried again.
func TestALinkThatCannotBeRemovedIsRemovedLater(t *testing.T) {
	w := newWorld(t)
	host, readOnly := newHost(), true
	remove := host.Remove
	host.Remove = func(path string) error {
		if readOnly && path == rootdir.EndpointLink(w.root, "a") {
			return syscall.EROFS
		}
		return remove(path)
	}
	s := socket(t, w.open(func(o *Options) { o.Host = host }), "a")
	if err := s.Publish(t.Context(), w.linked("a")); err != nil {
		t.Fatal(err)
	}
	if err := s.Withdraw(t.Context()); !errors.Is(err, syscall.EROFS) || !s.Look().Up {
		t.Errorf("withdrawn with the link left: %v, up %t", err, s.Look().Up)
	}
	readOnly = false
	if err := s.Withdraw(t.Context()); err != nil || s.Look().Up || !isGone(rootdir.EndpointLink(w.root, "a")) {
		t.Errorf("tried again: %v, up %t, link gone %t", err, s.Look().Up, isGone(rootdir.EndpointLink(w.root, "a")))
	}
}

// A publication that fails may have made the link already: it goes with its driver.
func TestTheLinkOfAFailedPublicationIsDiscarded(t *testing.T) {
	w := newWorld(t)
	serveSidecar(t, w.dir+"/other.sock", registerapi.CSIPlugin, "a")
	s := socket(t, w.open(), "a")
	if err := s.Publish(t.Context(), w.linked("a")); !isConflict(err) {
		t.Fatal(err)
	}
	if err := discard(t, s); err != nil || !isGone(rootdir.EndpointLink(w.root, "a")) {
		t.Errorf("%v, link gone %t", err, isGone(rootdir.EndpointLink(w.root, "a")))
	}
}

// The daemon may be compromised, so a record is not proof: no link is removed but the driver's.
func TestLinkOfARecordIsChecked(t *testing.T) {
	w := newWorld(t)
	other := filepath.Join(w.root, "other.sock")
	if err := os.Symlink("/run/a", other); err != nil {
		t.Fatal(err)
	}
	rec := record{
		Path: filepath.Join(w.dir, "a-reg.sock"),
		Publication: status.Publication{
			Announced: status.Announcement{Endpoint: other, LinkTarget: "/run/a"},
		},
	}
	if err := rec.removeLink(newHost(), "a"); err != nil || isGone(other) {
		t.Errorf("removed: %t, %v", isGone(other), err)
	}
}

func TestRecord(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	refused := func(want string) {
		t.Helper()
		if err := s.Record(t.Context(), nil, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	refused("not published")
	publish(t, s)
	refused("write endpoint_link = true")
	if err := s.Publish(t.Context(), w.linked("a")); err != nil {
		t.Fatal(err)
	}
	var recorder string
	var l net.Listener
	record := func(listen func(path string) error, linked func(stop context.CancelFunc)) error {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		return s.Record(ctx, func(_ context.Context, path string) (err error) { recorder = path; return listen(path) }, func() { linked(stop) })
	}
	listening := func(path string) (err error) {
		l, err = net.Listen("unix", path)
		return err
	}
	err := record(listening, func(stop context.CancelFunc) {
		defer stop()
		w.wantLink("a", recorder)
		if now := look(t, s); !now.Traced {
			t.Error("not shown")
		}
		w.wantLink("a", recorder) // also after a Check
		refused("it is traced already")
		a := w.linked("a")
		a.Versions = []string{"1.1.0"}
		if err := s.Publish(t.Context(), a); err != nil { // meanwhile
			t.Error(err)
		}
		w.wantLink("a", recorder)
		select {
		case <-s.Hints():
		default:
		}
	})
	select {
	case <-s.Hints():
	default:
		t.Error("no hint at the end: if there is no link by now, nothing else gives one")
	}
	if err != nil || s.Look().Traced || !isGone(recorder) {
		t.Errorf("%v, traced %t, recorder's socket gone: %t", err, s.Look().Traced, isGone(recorder))
	}
	w.wantLink("a", "/run/a/csi.sock")
	l.Close()

	full := errors.New("no descriptors left")
	never := func(context.CancelFunc) { t.Error("linked") }
	if err := record(func(string) error { return full }, never); !errors.Is(err, full) {
		t.Error(err)
	}
	if err := record(func(string) error { return nil }, never); err == nil || !strings.Contains(err.Error(), "no recorder listens") {
		t.Error(err)
	}
	w.wantLink("a", "/run/a/csi.sock")
	if err := record(listening, func(stop context.CancelFunc) { stop() }); err != nil {
		t.Errorf("after those: %v", err)
	}
	l.Close()
}

func TestLinkPointsWhereItIsToldTo(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "plugins", "csi-registrar", "a.csi.example.sock")
	for _, target := range []string{"/run/a/csi.sock", "/run/b/csi.sock", "/run/b/csi.sock"} {
		if err := newHost().pointLink(path, target, true); err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(path); got != target {
			t.Errorf("it points to %q (%v), want %q", got, err, target)
		}
	}
	if err := newHost().removeLink(path); err != nil {
		t.Error(err)
	}
	if err := newHost().removeLink(path); err != nil {
		t.Errorf("once more: %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

func TestLinkLeavesOtherThingsAlone(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"a regular file": func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a directory":    func(path string) error { return os.Mkdir(path, 0o700) },
		"a socket": func(path string) error {
			l, err := net.Listen("unix", path)
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		},
	} {
		path := filepath.Join(fake.ShortDir(t), "a.sock")
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{newHost().pointLink(path, "/run/a", true), newHost().removeLink(path)} {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s was replaced: %v", name, err)
		}
	}
}

// A client that connects while the link is changed always reaches a listener.
func TestLinkIsNeverMissing(t *testing.T) {
	dir := fake.ShortDir(t)
	path, targets := filepath.Join(dir, "link"), []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	var ended sync.WaitGroup
	defer ended.Wait()
	for _, target := range targets {
		l, err := net.Listen("unix", target)
		if err != nil {
			t.Fatal(err)
		}
		ended.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		})
		defer l.Close()
	}
	if err := newHost().pointLink(path, targets[0], true); err != nil {
		t.Fatal(err)
	}
	moved := make(chan error, 1)
	go func() {
		var errs []error
		for i := range 2000 {
			errs = append(errs, newHost().pointLink(path, targets[i%2], true))
		}
		moved <- errors.Join(errs...)
	}()
	for {
		switch c, err := net.Dial("unix", path); {
		case err == nil:
			c.Close()
		case !errors.Is(err, syscall.EAGAIN): // a full queue: somebody listens
			t.Fatal(err)
		}
		select {
		case err := <-moved:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
	}
}

// Whoever can put another link there can pose as the driver.
func TestLinkInADirectoryThatOthersMayWrite(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	dir := rootdir.EndpointLinks(w.root)
	if err := errors.Join(os.MkdirAll(dir, 0o750), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	err := s.Publish(t.Context(), w.linked("a"))
	if err == nil || !strings.Contains(err.Error(), "may be written by its group or others (mode 0777)") || !strings.Contains(err.Error(), "chmod go-w "+dir) {
		t.Error(err)
	}
	w.wantLink("a", "")
	if err := os.Chmod(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := s.Publish(t.Context(), w.linked("a")); err != nil {
		t.Error(err)
	}
}
