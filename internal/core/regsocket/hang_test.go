package regsocket

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/worker"
)

// hang makes all calls about the path wait, as a file system does that does not answer.
func hang(t *testing.T, r *Registry, path string) (answer func()) {
	t.Helper()
	begun, release, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		worker.Do(context.Background(), r.o.Pool.Slot(path, nil), time.Hour, func() error {
			close(begun)
			<-release
			return nil
		}, nil)
	}()
	<-begun
	answer = sync.OnceFunc(func() { close(release); <-ended })
	t.Cleanup(answer)
	return answer
}

func TestALinkToWhereNothingAnswersHoldsUpNoPublication(t *testing.T) {
	w := newWorld(t)
	serveSidecar(t, w.root+"/elsewhere.sock", registerapi.CSIPlugin, "a")
	if err := os.Symlink(w.root+"/elsewhere.sock", w.dir+"/z.sock"); err != nil {
		t.Fatal(err)
	}
	r := w.open()
	answer := hang(t, r, w.dir+"/z.sock")
	s := socket(t, r, "a")
	for range 2 {
		forgetSurvey(r)
		begin := time.Now()
		publish(t, s)
		if d := time.Since(begin); d < surveyWait || d >= askTime+surveyWait {
			t.Errorf("published after %v", d)
		}
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
	answer()
	eventually(t, "the other one is found", func() bool {
		forgetSurvey(r)
		return len(othersOf(t, r, "a")) == 1
	})
}

// The last findings are kept while the file system does not answer, and examined again
// afterwards.
func TestTheFileSystemOfTheSocketDoesNotAnswer(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w := newWorld(t)
	r, s := w.published("a")
	before := s.Look()
	answer := hang(t, r, s.path)
	if err := os.Remove(s.path); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		err := s.Check(t.Context())
		if _, ok := errors.AsType[*worker.NotAnswering](err); !ok || !strings.Contains(err.Error(), s.path) {
			t.Errorf("error is %v", err)
		}
	}
	if now := s.Look(); !sameAnnouncement(now.Announced, before.Announced) || now.Place != status.Ours {
		t.Errorf("%+v", now)
	}
	answer()
	wantPlace(t, s, status.Missing)
}

// A file that could not be adopted is closed with its Socket: the store keeps it for the next
// process.
func TestFilesAreClosedWithTheirSocket(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	for _, hangs := range []bool{false, true} {
		s := socket(t, r, "a")
		if hangs {
			hang(t, r, s.path)
		}
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := s.Adopt(ended, []*os.File{f}); !errors.Is(err, context.Canceled) {
			t.Errorf("adopted after the end: %v", err)
		}
		if err := s.Close(t.Context(), false); (err == nil) == hangs || !w.cannotAdopt() {
			t.Errorf("hangs %t: it is not said that nothing was adopted: %v", hangs, err)
		}
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("hangs %t: left open", hangs)
		}
	}
}

// blockingStore is a store that blocks in Keep.
type blockingStore struct {
	*manager
	begun, release chan struct{}
}

func (b *blockingStore) Keep(ctx context.Context, name string, c syscall.Conn) error {
	close(b.begun)
	<-b.release
	return b.manager.Keep(ctx, name, c)
}

// A publication that hangs is abandoned when the daemon stops. When it continues after all, it
// ends as its Socket has ended, and leaves nothing behind.
func TestClosedWhileAPublicationHangs(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	for _, end := range []string{"kept", "not kept", "discarded"} {
		keep := end == "kept"
		w := newWorld(t)
		b := &blockingStore{newManager(t), make(chan struct{}), make(chan struct{})}
		r := w.open(with(b, end != "not kept"))
		s := socket(t, r, "a")
		ctx, stop := context.WithCancel(t.Context())
		published := make(chan error, 1)
		go func() { published <- s.Publish(ctx, announcement("a")) }()
		<-b.begun
		stop()
		begin := time.Now()
		if err := <-published; !errors.Is(err, context.Canceled) {
			t.Errorf("published: %v", err)
		}
		// discarded: its driver was disabled
		err := s.Close(t.Context(), end == "discarded")
		r.Close(t.Context())
		if _, ok := errors.AsType[*worker.NotAnswering](err); !ok {
			t.Errorf("closed: %v", err)
		}
		if d := time.Since(begin); d > 2*closeTime {
			t.Errorf("the end took %v", d)
		}
		// The scan has ended.
		eventually(t, "only it is stuck", func() bool { return len(r.o.Pool.Stuck()) == 1 })
		close(b.release)
		eventually(t, "it ends", func() bool { return len(r.o.Pool.Stuck()) == 0 })
		if gone := isGone(s.path); gone == keep || isGone(r.recordOf("a")) == keep || b.count("registration-a") == 1 != keep {
			t.Errorf("%s: path gone %t, record gone %t, %d in the store", end, gone, isGone(r.recordOf("a")), b.count("registration-a"))
		}
		if !keep {
			continue
		}
		next := socket(t, w.open(with(b.manager, keep)), "a")
		if err := next.Adopt(t.Context(), b.pass(t, "registration-a")); err != nil || !next.Look().Up {
			t.Errorf("the next process: %v", err)
		}
		mustAnswer(t, s.path, announcement("a").Endpoint)
	}
}

func TestASlowStoreDelaysAndARefusingStoreIsTold(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	m.slow = 300 * time.Millisecond
	_, s := w.published("a", with(m, true))
	if l := s.Look(); l.NotKept != "" || l.Place != status.Ours || m.count("registration-a") != 1 {
		t.Errorf("slow: %+v", l)
	}
	m.slow, m.fail = 0, errors.New("the store is full")
	publish(t, s)
	if l := s.Look(); l.NotKept != "the store is full" || l.Place != status.Ours {
		t.Errorf("full: %+v", l)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
	m.fail = nil
	publish(t, s)
	if l := s.Look(); l.NotKept != "" {
		t.Errorf("%+v", l)
	}
}

func TestATransientErrorIsNotTakenForAMissingSocket(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	_, s := w.published("a", with(m, true))
	before := s.Look()
	aside := w.dir + ".x"
	if err := errors.Join(os.Rename(w.dir, aside), os.Symlink(w.dir, w.dir)); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "symbolic links") {
		t.Errorf("error is %v", err)
	}
	if now := s.Look(); now.Place != before.Place || now.DirMissing || now.DirRecreated || !now.Up {
		t.Errorf("%+v", now)
	}
	if err := s.Publish(t.Context(), announcement("a")); err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("not one error: %v", err)
	}
	// Nor is the registration lost if the next process gets the error at its start.
	if err := s.Close(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	s = socket(t, w.open(with(m, true)), "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err == nil || !s.Look().Up {
		t.Errorf("adopted: %t, %v", s.Look().Up, err)
	}
	if err := errors.Join(os.Remove(w.dir), os.Rename(aside, w.dir)); err != nil {
		t.Fatal(err)
	}
	wantPlace(t, s, status.Ours)
	mustAnswer(t, s.path, announcement("a").Endpoint)
	if look(t, s).DirRecreated {
		t.Error("it is the same directory")
	}
}
