package kubelet

import (
	"errors"
	"testing"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

// What is at the path is the store's own listener, so nothing else may become of it: while its
// file system does not answer it is neither given up nor taken for somebody else's.
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
	// The registrar knows of nothing yet, so this is what it does.
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
