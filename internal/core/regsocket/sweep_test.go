package regsocket

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// A stale socket of a driver that is configured is removed before the kubelet starts, also while
// the driver is absent; other files, and drivers that are not configured, are left alone.
func TestAdoptRemovesAStaleSocket(t *testing.T) {
	w := newWorld(t)
	r, ours := w.published("ours")
	for _, name := range []string{"dead", "notconfigured"} {
		deadSocket(t, pathOf(r, name))
	}
	listen(t, pathOf(r, "live"))
	os.WriteFile(pathOf(r, "file"), nil, 0o600)
	os.Symlink(pathOf(r, "dead"), pathOf(r, "link"))
	for _, name := range []string{"dead", "live", "file", "link", "absent"} {
		if s := socket(t, r, name); s.Adopt(t.Context(), nil) != nil || s.Look().Up {
			t.Errorf("%s: %+v", name, s.Look())
		}
		if gone := isGone(pathOf(r, name)); gone != (name == "dead" || name == "absent") {
			t.Errorf("%s is gone: %t", name, gone)
		}
	}
	if isGone(pathOf(r, "notconfigured")) {
		t.Error("the socket of another driver is gone")
	}
	mustAnswer(t, ours.path, announcement("ours").Endpoint)
}

// While the descriptor store is full, a process that is killed leaves a socket and its record. If
// the driver is no longer configured at the next start, only the record names them.
func TestLeftovers(t *testing.T) {
	w := newWorld(t)
	run := withRun(w)
	r := w.open(func(o *Options) { o.RunDir = run.RunDir })
	record := func(driver string, at unixsock.File) string {
		t.Helper()
		file := filepath.Join(run.RunDir, "registrations", driver+".json")
		rec := record{Path: pathOf(r, driver), FileID: at.FileID}
		if err := newHost().writeJSON(file, rec); err != nil {
			t.Fatal(err)
		}
		return file
	}
	stat := func(path string) unixsock.File {
		f, err := unixsock.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	deadSocket(t, pathOf(r, "killed"))
	deadSocket(t, pathOf(r, "configured"))
	deadSocket(t, pathOf(r, "stale")) // not the socket of its record
	listen(t, pathOf(r, "another"))   // not the socket of its record, and served
	listen(t, pathOf(r, "kept"))      // by the descriptor store
	killed := record("killed", stat(pathOf(r, "killed")))
	configured := record("configured", stat(pathOf(r, "configured")))
	stale := record("stale", unixsock.File{})
	another := record("another", unixsock.File{})
	kept := record("kept", stat(pathOf(r, "kept")))

	if err := r.RemoveLeftovers(t.Context(), []string{"configured"}, nil); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]bool{"kept": true, "killed": true, "stale": true, "another": false, "configured": false} {
		if gone := isGone(pathOf(r, name)); gone != want {
			t.Errorf("the socket of %s is gone: %t", name, gone)
		}
	}
	if !isGone(killed) || !isGone(stale) || !isGone(another) || !isGone(kept) || isGone(configured) {
		t.Errorf("the records are gone: killed %t, stale %t, another %t, kept %t, configured %t", isGone(killed), isGone(stale), isGone(another), isGone(kept), isGone(configured))
	}
}

// A listener in the store goes with its socket and its record, and so does one without a record.
// The path of a record below an earlier root_dir is removed, too.
func TestLeftoversInTheStore(t *testing.T) {
	w, m := left(t, "a", "b", "c")
	r := w.open(with(m, true))
	if err := os.Remove(r.recordOf("b")); err != nil {
		t.Fatal(err)
	}
	other := w.root + "/k2/plugins_registry"
	if err := os.MkdirAll(other, 0o750); err != nil {
		t.Fatal(err)
	}
	rec := recorded(r, "c")
	rec.Path = other + "/c-reg.sock"
	if err := errors.Join(os.Rename(pathOf(r, "c"), rec.Path), r.o.Host.writeJSON(r.recordOf("c"), rec)); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveLeftovers(t.Context(), nil, []string{"a", "b", "c", "../x"}); err != nil {
		t.Error(err)
	}
	for _, path := range []string{pathOf(r, "a"), pathOf(r, "b"), rec.Path} {
		if !isGone(path) {
			t.Errorf("%s is still there", path)
		}
	}
	for _, name := range []string{"a", "b", "c"} {
		if m.count("registration-"+name) != 0 || !isGone(r.recordOf(name)) {
			t.Errorf("%s: in the store %d, record gone %t", name, m.count("registration-"+name), isGone(r.recordOf(name)))
		}
	}
}

// A leftover that cannot be removed yet is removed by a later call, by its record. A driver that
// was enabled meanwhile is left alone.
func TestLeftoversAreTriedAgain(t *testing.T) {
	w, m := left(t, "a", "b")
	host := newHost()
	remove := host.RemoveFile
	host.RemoveFile = func(string, unixsock.FileID) (bool, error) { return false, unix.EROFS }
	r := w.open(with(m, true), func(o *Options) { o.Host = host })
	if err := r.RemoveLeftovers(t.Context(), nil, []string{"a", "b"}); !errors.Is(err, unix.EROFS) || isGone(pathOf(r, "a")) {
		t.Errorf("%v; the socket is gone: %t", err, isGone(pathOf(r, "a")))
	}
	host.RemoveFile = remove
	s := socket(t, r, "b")
	publish(t, s)
	if err := r.RemoveLeftovers(t.Context(), nil, nil); err != nil || !isGone(pathOf(r, "a")) || !isGone(r.recordOf("a")) {
		t.Errorf("%v; socket gone %t, record gone %t", err, isGone(pathOf(r, "a")), isGone(r.recordOf("a")))
	}
	mustAnswer(t, s.path, announcement("b").Endpoint)
	if isGone(r.recordOf("b")) || m.count("registration-b") != 1 {
		t.Error("the registration of the driver that is enabled again was removed")
	}
}

// On a read-only file system nothing can be removed, so that a driver that is disabled leaves its
// socket. It is removed as soon as that is possible, also if the driver is enabled again meanwhile,
// and not ready. What can still be adopted stays.
func TestLeftoverOfAnEnabledDriver(t *testing.T) {
	w, m := left(t, "a", "late")
	host := newHost()
	readOnly, full := true, false
	host.RemoveFile = func(path string, id unixsock.FileID) (bool, error) {
		if readOnly {
			return false, unix.EROFS
		}
		return unixsock.Remove(path, id)
	}
	host.Vacate = func(ctx context.Context, path string) (bool, error) {
		if readOnly {
			return false, unix.EROFS
		}
		return unixsock.Vacate(ctx, path)
	}
	host.FileListener = func(f *os.File) (Listener, error) {
		if full {
			return nil, unix.EMFILE
		}
		return newHost().FileListener(f)
	}
	r := w.open(with(m, true), func(o *Options) { o.Host = host })
	if err := r.RemoveLeftovers(t.Context(), []string{"late"}, []string{"a"}); !errors.Is(err, unix.EROFS) {
		t.Fatal(err)
	}
	_ = socket(t, r, "a").Adopt(t.Context(), nil)
	full = true
	if err := socket(t, r, "late").Adopt(t.Context(), m.pass(t, "registration-late")); err == nil {
		t.Fatal("adopted without a descriptor")
	}
	if err := r.RemoveLeftovers(t.Context(), []string{"a", "late"}, nil); !errors.Is(err, unix.EROFS) || isGone(r.recordOf("a")) {
		t.Fatal(err)
	}
	readOnly = false
	if err := r.RemoveLeftovers(t.Context(), []string{"a", "late"}, nil); err != nil || !isGone(pathOf(r, "a")) || !isGone(r.recordOf("a")) {
		t.Errorf("%v; socket gone %t, record gone %t", err, isGone(pathOf(r, "a")), isGone(r.recordOf("a")))
	}
	if isGone(pathOf(r, "late")) || isGone(r.recordOf("late")) || m.count("registration-late") != 1 {
		t.Error("what is not adopted yet is gone")
	}
}

// A process that is killed while it publishes below another root_dir leaves a socket there.
func TestLeftoverOfAKilledPublication(t *testing.T) {
	w := newWorld(t)
	run := withRun(w)
	r := w.open(func(o *Options) { o.RunDir = run.RunDir })
	other := w.root + "/k2/plugins_registry"
	if err := os.MkdirAll(other, 0o750); err != nil {
		t.Fatal(err)
	}
	rec := record{Path: other + "/a-reg.sock"}
	deadSocket(t, rec.Path)
	if err := newHost().writeJSON(r.recordOf("a"), rec); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveLeftovers(t.Context(), nil, nil); err != nil || !isGone(rec.Path) || !isGone(r.recordOf("a")) {
		t.Errorf("%v; socket gone %t, record gone %t", err, isGone(rec.Path), isGone(r.recordOf("a")))
	}
}

// A sweep hangs and is abandoned, and its driver is enabled: the record is that of the new
// registration when the sweep continues.
func TestLateLeftovers(t *testing.T) {
	w := newWorld(t)
	host := newHost()
	begun, release := make(chan struct{}), make(chan struct{})
	var hung atomic.Bool
	host.RemoveFile = func(path string, id unixsock.FileID) (bool, error) {
		if hung.CompareAndSwap(false, true) {
			close(begun)
			<-release
		}
		return unixsock.Remove(path, id)
	}
	run := withRun(w)
	r := w.open(func(o *Options) { o.RunDir, o.Host = run.RunDir, host })
	rec := record{Path: pathOf(r, "a"), FileID: unixsock.FileID{Ino: 1}}
	if err := host.writeJSON(r.recordOf("a"), rec); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveLeftovers(t.Context(), nil, nil); err == nil {
		t.Fatal("the sweep did not hang")
	}
	<-begun
	s := socket(t, r, "a")
	if _, ok := errors.AsType[*worker.NotAnswering](s.Publish(t.Context(), announcement("a"))); !ok {
		t.Error("published before the sweep has returned")
	}
	close(release)
	eventually(t, "the sweep has returned", func() bool { return len(r.o.Pool.Stuck()) == 0 })
	publish(t, s)
	if isGone(r.recordOf("a")) {
		t.Error("the record of the registration is gone")
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
}
