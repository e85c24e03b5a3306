package regsocket

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// The listener in the store is at the path: while the file system does not answer, it is neither
// given up nor mistaken for somebody else's.
func TestWhatTheStoreKeptIsAdoptedWhenTheFileSystemAnswers(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w, m := left(t, "a")
	before, err := unixsock.Lstat(w.dir + "/a-reg.sock")
	if err != nil {
		t.Fatal(err)
	}
	r := w.open(with(m, true))
	s := socket(t, r, "a")
	answer := hang(t, r, s.path)
	err = s.Adopt(t.Context(), m.pass(t, "registration-a"))
	if _, ok := errors.AsType[*worker.NotAnswering](err); !ok {
		t.Fatalf("adopted without an answer: %v", err)
	}
	answer()
	// The registrar does not know of it yet, so it publishes, and learns that nothing was
	// published.
	if err := s.Publish(t.Context(), announcement("a")); err == nil || !strings.Contains(err.Error(), "adopted late") {
		t.Fatal(err)
	}
	if l := look(t, s); !l.Up || l.Place != status.Ours || !l.Notification.Registered {
		t.Errorf("adopted: %+v", l)
	}
	if after, err := unixsock.Lstat(s.path); after != before || err != nil {
		t.Errorf("another socket: %v", err)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

// A publication that hangs completes after its Socket was discarded: nothing is left of it.
func TestLatePublicationAfterDiscard(t *testing.T) {
	for _, published := range []bool{false, true} {
		w := newWorld(t)
		m := newManager(t)
		host, begun, release := newHost(), make(chan struct{}), make(chan struct{})
		listen, remove := host.Listen, host.RemoveFile
		r := w.open(with(m, true), func(o *Options) { o.Host = host })
		s := socket(t, r, "a")
		if published {
			publish(t, s)
			host.RemoveFile = func(path string, id unixsock.FileID) (bool, error) {
				if path == s.path {
					begun <- struct{}{}
					<-release
				}
				return remove(path, id)
			}
		} else {
			host.Listen = func(ctx context.Context, path string, before func(syscall.Conn) error) (Listener, unixsock.File, error) {
				if strings.HasPrefix(path, w.root) {
					begun <- struct{}{}
					<-release
				}
				return listen(ctx, path, before)
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Publish(ctx, announcement("a")) }()
		<-begun
		stop()
		if err := errors.Join(<-done, discard(t, s)); err == nil {
			t.Error("nothing hung")
		}
		go func() {
			for range begun { // another removal
			}
		}()
		close(release)
		eventually(t, "the late call has returned", func() bool { return len(r.o.Pool.Stuck()) == 0 })
		close(begun)
		if m.count("registration-a") != 0 || !isGone(r.recordOf("a")) || !isGone(s.path) {
			t.Errorf("published before: %t; in the store: %d, record gone %t, path gone %t", published, m.count("registration-a"), isGone(r.recordOf("a")), isGone(s.path))
		}
	}
}

// After a kill -9 while the store was full there is a record without a listener. It goes with the
// registration.
func TestARecordWithoutAListenerIsDiscarded(t *testing.T) {
	w, m := left(t, "a")
	r := w.open(with(m, true))
	if isGone(r.recordOf("a")) {
		t.Fatal("there is no record")
	}
	if err := discard(t, socket(t, r, "a")); err != nil {
		t.Fatal(err)
	}
	if !isGone(r.recordOf("a")) {
		t.Error("the record is left")
	}
}

// An abandoned adoption continues after its time is over. It still removes a socket that it cannot
// prove: nobody serves it, and the kubelet would wait for it.
func TestALateAdoptionRemovesWhatItCannotProve(t *testing.T) {
	w, m := left(t, "a")
	r := w.open(with(m, true))
	s := socket(t, r, "a")
	if err := os.Remove(r.recordOf("a")); err != nil {
		t.Fatal(err)
	}
	files := m.pass(t, "registration-a")
	s.toAdopt.Store(&files)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.adopt(ctx); err == nil || s.Look().Up {
		t.Errorf("adopted: %v", err)
	}
	if !isGone(s.path) {
		t.Error("the socket is left")
	}
}

// An error with a socket of an earlier process does not make the next change fail: a good
// publication would be retried, which costs the kubelet another registration.
func TestALateAdoptionThatFailsIsNotTheErrorOfTheNextChange(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w, m := left(t, "a")
	r := w.open(with(m, true))
	s := socket(t, r, "a")
	if err := os.Remove(r.recordOf("a")); err != nil {
		t.Fatal(err)
	}
	answer := hang(t, r, s.path)
	err := s.Adopt(t.Context(), m.pass(t, "registration-a"))
	if _, ok := errors.AsType[*worker.NotAnswering](err); !ok {
		t.Fatalf("adopted without an answer: %v", err)
	}
	answer()
	if err := s.Publish(t.Context(), announcement("a")); err != nil {
		t.Errorf("published, but: %v", err)
	}
	wantPlace(t, s, status.Ours)
	if log := w.log.String(); !strings.Contains(log, "the socket has no record") {
		t.Errorf("the reason is not logged:\n%s", log)
	}
}

// The process ends while a socket is bound: the next one adopts it.
func TestClosedWhileTheSocketIsPutInPlace(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w := newWorld(t)
	host := newHost()
	begun, release := make(chan struct{}), make(chan struct{})
	host.Listen = func(ctx context.Context, path string, before func(syscall.Conn) error) (Listener, unixsock.File, error) {
		close(begun)
		<-release
		return unixsock.Listen(ctx, path, before)
	}
	m := newManager(t)
	r := w.open(with(m, true), func(o *Options) { o.Host = host })
	s := socket(t, r, "a")
	ctx, stop := context.WithCancel(t.Context())
	published := make(chan error, 1)
	go func() { published <- s.Publish(ctx, announcement("a")) }()
	<-begun
	stop()
	if err := <-published; !errors.Is(err, context.Canceled) {
		t.Errorf("published: %v", err)
	}
	// After Close has given up. Nothing orders the two, so the race detector sees what they share.
	time.AfterFunc(2*closeTime, func() { close(release) })
	err := s.Close(t.Context(), false)
	if _, ok := errors.AsType[*worker.NotAnswering](err); !ok {
		t.Errorf("closed: %v", err)
	}
	eventually(t, "the publication ends", func() bool { return len(r.o.Pool.Stuck()) == 0 })
	next := socket(t, w.open(with(m, true)), "a")
	if err := next.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil || look(t, next).Place != status.Ours {
		t.Errorf("the next process: %v, %+v", err, next.Look())
	}
}
