package kubelet

import (
	"context"
	"errors"
	"os"
	"testing"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

// The listener in the store is at the path: while the file system does not answer, it is neither
// given up nor mistaken for somebody else's.
func TestWhatTheStoreKeptIsAdoptedWhenTheFileSystemAnswers(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	leave(w, m, "a")
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
	// The registrar does not know of it yet, so it publishes.
	if err := s.Publish(t.Context(), announcement("a")); err != nil {
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

// An abandoned adoption continues after its time is over. It still removes a socket that it cannot
// prove: nobody serves it, and the kubelet would wait for it.
func TestALateAdoptionRemovesWhatItCannotProve(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	leave(w, m, "a")
	r := w.open(with(m, true))
	s := socket(t, r, "a")
	if err := os.Remove(r.recordOf("a")); err != nil {
		t.Fatal(err)
	}
	files := m.pass(t, "registration-a")
	s.handed.Store(&files)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.adopt(ctx); err == nil || s.Look().Up {
		t.Errorf("adopted: %v", err)
	}
	if !isGone(s.path) {
		t.Error("the socket is left")
	}
}
