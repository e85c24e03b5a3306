package regsocket

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

// TestModeOfRecords checks that only the daemon can read its records, whatever the umask is.
func TestModeOfRecords(t *testing.T) {
	w := newWorld(t)
	umask := syscall.Umask(0)
	_, s := w.published("a")
	syscall.Umask(umask)
	for path, want := range map[string]os.FileMode{recordsIn(w.run): 0o700, s.r.recordOf("a"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
}

// closedConn counts calls of Close.
type closedConn struct {
	net.Conn
	closed int
}

func (c *closedConn) Close() error { c.closed++; return nil }

// TestCallersOfEachSocket checks that 64 connections to each socket are kept, and that one more
// closes the first of its own socket.
func TestCallersOfEachSocket(t *testing.T) {
	r := &Registry{callers: &callers{}}
	connect := func(s *Socket) *closedConn {
		c := &closedConn{}
		r.callers.accept(&listener{s: s}, c)
		return c
	}
	a, b := &Socket{r: r}, &Socket{r: r}
	var ofA, ofB []*closedConn
	for range 64 {
		ofA, ofB = append(ofA, connect(a)), append(ofB, connect(b))
	}
	closed := func() (n int) {
		for _, c := range append(append([]*closedConn{}, ofA...), ofB...) {
			n += c.closed
		}
		return n
	}
	if n := closed(); n != 0 {
		t.Errorf("%d of 64 for each are closed", n)
	}
	ofB = append(ofB, connect(b))
	if n := closed(); n != 1 || ofB[0].closed != 1 {
		t.Errorf("%d are closed by number 65", n)
	}
	r.callers.close()
	if n := closed(); n != len(ofA)+len(ofB) || len(r.callers.open) != 0 {
		t.Errorf("%d are closed, and %d sockets remembered", n, len(r.callers.open))
	}
}

// forgetting is a Store that notes whether there was a record when a name was forgotten.
type forgetting struct {
	noStore
	record string
	found  bool
}

func (f *forgetting) Forget(context.Context, string) error {
	_, err := os.Lstat(f.record)
	f.found = f.found || err == nil
	return nil
}

// TestRecordGoesBeforeItsListener checks the order of a withdrawal: if the process is killed in
// between, the next one must close a listener without a record, not adopt one that is withdrawn.
func TestRecordGoesBeforeItsListener(t *testing.T) {
	w, store := newWorld(t), &forgetting{}
	_, s := w.published("a", with(store, true))
	store.record = s.r.recordOf("a")
	if _, err := os.Lstat(store.record); err != nil {
		t.Fatal(err)
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	if store.found {
		t.Error("the listener was forgotten while its record was there")
	}
	if !isGone(store.record) {
		t.Error("the record is left")
	}
}

// TestRecordOfAMomentAhead checks that no time of a record is in the future, however little.
func TestRecordOfAMomentAhead(t *testing.T) {
	w := newWorld(t)
	ahead := time.Now().Add(time.Minute)
	var rec record
	rec.PublishedAt, rec.GetInfoAt, rec.Notification.At, rec.FirstAcceptedAt = ahead, ahead, ahead, ahead
	path := filepath.Join(w.root, "record.json")
	h := newHost()
	if err := h.writeJSON(path, rec); err != nil {
		t.Fatal(err)
	}
	got, err := h.readRecord(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, at := range map[string]time.Time{
		"published": got.PublishedAt, "asked": got.GetInfoAt, "notified": got.Notification.At, "first accepted": got.FirstAcceptedAt,
	} {
		if at.After(time.Now()) || at.IsZero() {
			t.Errorf("%s at %s", what, at)
		}
	}
}

// TestRecordThatCannotBeWritten checks that half a record is removed, and the one before it stays.
func TestRecordThatCannotBeWritten(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.root, "records", "a.json")
	h := newHost()
	if err := h.writeJSON(path, "before"); err != nil {
		t.Fatal(err)
	}
	h.WriteFile = func(name string, b []byte, mode os.FileMode) error {
		if err := os.WriteFile(name, b[:1], mode); err != nil {
			t.Error(err)
		}
		return syscall.ENOSPC
	}
	if err := h.writeJSON(path, "after"); err == nil {
		t.Error("no error")
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if text, _ := os.ReadFile(path); err != nil || len(entries) != 1 || string(text) != `"before"` {
		t.Errorf("%v, %v, %s", entries, err, text)
	}
}

// TestRecordIsTriedAgain checks that a record that could not be written is a reason to look again:
// nothing else gives a hint when /run has space.
func TestRecordIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := options()
		o.RunDir, o.Host = t.TempDir(), newHost()
		o.Host.WriteFile = func(string, []byte, os.FileMode) error { return syscall.ENOSPC }
		r, err := Open(fake.ShortDir(t), o)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close(t.Context())
		s := socket(t, r, "a")
		defer s.Close(t.Context(), false)
		if err := s.write(newListener(s, nil, record{})); !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		select {
		case <-s.Hints():
		case <-time.After(time.Minute):
			t.Error("no hint")
		}
	})
}

// TestLongRefusal checks that 1,000 characters of the kubelet's error are kept.
func TestLongRefusal(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	k := dialAsKubelet(t, s.path)
	defer k.cc.Close()
	k.notify(t, false, strings.Repeat("x", 1000))
	if got := s.Look().Notification.Error; got != strings.Repeat("x", 1000) {
		t.Errorf("%d characters", len([]rune(got)))
	}
	k.notify(t, false, strings.Repeat("x", 5000))
	if got := s.Look().Notification.Error; len([]rune(got)) != 1000 || !strings.HasSuffix(got, "…") {
		t.Errorf("%d characters", len([]rune(got)))
	}
}

// FuzzRecord checks that whatever a record has, no time of it is in the future, and it names no
// path but that of its driver's registration socket in a plugins_registry.
func FuzzRecord(f *testing.F) {
	good, err := json.Marshal(record{Path: "/k/plugins_registry/a.example-reg.sock", Cookie: 7})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"path":"/k/plugins_registry/../../etc/a.example-reg.sock"}`))
	f.Add([]byte(`{"path":"/k/plugins_registry/b.example-reg.sock","published_at":"9999-01-01T00:00:00Z","notification":null}`))
	f.Add([]byte("null"))
	dir := f.TempDir()
	if err := os.Mkdir(recordsIn(dir), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		file := filepath.Join(recordsIn(dir), "a.example.json")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		left, err := Recorded(dir)
		if len(left) > 1 || len(left) == 1 && err != nil {
			t.Fatalf("%v, %v", left, err)
		}
		for _, rec := range left {
			now := time.Now()
			if rec.PublishedAt.After(now) || rec.GetInfoAt.After(now) || rec.Notification.At.After(now) || rec.FirstAcceptedAt.After(now) {
				t.Errorf("a time in the future: %+v", rec)
			}
			if !strings.HasSuffix(rec.Path, "/"+rootdir.PluginsRegistryName+"/"+rootdir.SocketName("a.example")) || strings.Contains(rec.Path, "/../") {
				t.Errorf("it names %q", rec.Path)
			}
		}
	})
}

// TestSameKubeletReportsAgain checks that a kubelet that reports more than once is followed by one
// pidfd: each other is closed.
func TestSameKubeletReportsAgain(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process()
	s := w.registrable(p)
	k := dialAsKubelet(t, s.path)
	defer k.cc.Close()
	k.notify(t, true, "")
	before := fake.Descriptors(t)
	for range 5 {
		k.notify(t, true, "")
	}
	if after := fake.Descriptors(t); after > before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}

// TestEndedContextReplacesNothing checks that a publication that nobody waits for any more leaves
// the socket that is in place: the next process adopts it.
func TestEndedContextReplacesNothing(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	before, err := unixsock.Lstat(s.path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	end()
	err = s.publish(ctx, s.Look().Announced)
	if after, statErr := unixsock.Lstat(s.path); !errors.Is(err, context.Canceled) || statErr != nil || after.FileID != before.FileID {
		t.Errorf("%v, replaced: %t", err, after.FileID != before.FileID)
	}
}

// TestKubeletThatReportsAtTheEnd checks that a call in flight while the daemon ends begins no new
// following of its caller, which nothing would end.
func TestKubeletThatReportsAtTheEnd(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process()
	s := w.registrable(p)
	k := dialAsKubelet(t, s.path)
	defer k.cc.Close()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	k.notify(t, true, "")
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd != nil {
		t.Error("it is followed")
	}
}
