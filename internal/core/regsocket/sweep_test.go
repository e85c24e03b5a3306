package kubelet

import (
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/unixsock"
)

func TestSweep(t *testing.T) {
	w := newWorld(t)
	r, s := w.published("ours")
	begin := time.Now()
	deadSocket(t, pathOf(r, "dead"))
	deadSocket(t, pathOf(r, "dead2"))
	deadSocket(t, pathOf(r, "notconfigured"))
	deadSocket(t, w.dir+"/other.sock")
	deadSocket(t, w.dir+"/.csi-reg-01234567")
	deadSocket(t, w.dir+"/.csi-reg-xyz")
	listen(t, w.dir+"/.csi-reg-00000000")
	listen(t, pathOf(r, "live"))
	os.WriteFile(pathOf(r, "file"), nil, 0o600)
	os.Symlink(pathOf(r, "dead"), pathOf(r, "link"))
	names := []string{"ours", "dead", "dead2", "live", "file", "link", "absent", "../x"}

	removed, err := r.Sweep(t.Context(), names)
	if err != nil {
		t.Fatal(err)
	}
	if d := time.Since(begin); d < staleFor-tick || d > 20*staleFor {
		t.Errorf("took %v", d)
	}
	slices.Sort(removed)
	want := []string{w.dir + "/.csi-reg-01234567", pathOf(r, "dead"), pathOf(r, "dead2")}
	slices.Sort(want)
	if !slices.Equal(removed, want) {
		t.Errorf("removed %v, want %v", removed, want)
	}
	for _, path := range want {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	mustAnswer(t, s.path, announcement("ours").Endpoint)

	begin = time.Now()
	if removed, err := r.Sweep(t.Context(), names); err != nil || removed != nil {
		t.Errorf("again: %v, %v", removed, err)
	}
	if d := time.Since(begin); d > 20*staleFor {
		t.Errorf("with nothing stale it took %v", d)
	}
}

// A process that was killed before it published can leave a link without a record.
func TestSweepOfLinks(t *testing.T) {
	w := newWorld(t)
	run := withRun(w)
	r := w.open(func(o *Options) { o.RunDir = run.RunDir })
	s := socket(t, r, "ours")
	if err := s.Publish(t.Context(), w.linked("ours")); err != nil {
		t.Fatal(err)
	}
	orphan := rootdir.EndpointLink(w.root, "orphan")
	if err := os.Symlink("/run/a/csi.sock", orphan); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sweep(t.Context(), nil); err != nil || !isGone(orphan) {
		t.Errorf("%v, the orphan is gone: %t", err, isGone(orphan))
	}
	w.wantLink("ours", "/run/ours/csi.sock")
}

// While the descriptor store is full, a process that is killed leaves a socket and its record. If
// the driver is no longer configured at the next start, only the record names them.
func TestSweepOfRecords(t *testing.T) {
	w := newWorld(t)
	run := withRun(w)
	r := w.open(func(o *Options) { o.RunDir = run.RunDir })
	record := func(driver string, at unixsock.File) string {
		t.Helper()
		file := filepath.Join(run.RunDir, "registrations", driver+".json")
		rec := record{Path: pathOf(r, driver), Bound: w.dir + "/.csi-reg-01234567", FileID: at.FileID}
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
	deadSocket(t, pathOf(r, "another")) // not the socket of its record
	listen(t, pathOf(r, "kept"))        // by the descriptor store
	killed := record("killed", stat(pathOf(r, "killed")))
	configured := record("configured", stat(pathOf(r, "configured")))
	another := record("another", unixsock.File{})
	kept := record("kept", stat(pathOf(r, "kept")))

	removed, err := r.SweepRecords(t.Context(), []string{"configured"})
	if err != nil || !slices.Equal(removed, []string{pathOf(r, "killed")}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	if !isGone(killed) || !isGone(another) || isGone(kept) || isGone(configured) {
		t.Errorf("the records are gone: killed %t, another %t, kept %t, configured %t", isGone(killed), isGone(another), isGone(kept), isGone(configured))
	}
}

// A sweep hangs and is abandoned, and its driver is enabled: the record is that of the new
// registration when the sweep continues.
func TestLateSweepOfRecords(t *testing.T) {
	w := newWorld(t)
	host := newHost()
	begun, release := make(chan struct{}), make(chan struct{})
	var hung atomic.Bool
	host.Lstat = func(path string) (unixsock.File, error) {
		if hung.CompareAndSwap(false, true) {
			close(begun)
			<-release
		}
		return unixsock.Lstat(path)
	}
	run := withRun(w)
	r := w.open(func(o *Options) { o.RunDir, o.Host = run.RunDir, host })
	rec := record{Path: pathOf(r, "a"), Bound: w.dir + "/.csi-reg-01234567"}
	if err := host.writeJSON(r.recordOf("a"), rec); err != nil {
		t.Fatal(err)
	}
	if _, err := r.SweepRecords(t.Context(), nil); err == nil {
		t.Fatal("the sweep did not hang")
	}
	<-begun
	s := socket(t, r, "a")
	publish(t, s)
	close(release)
	eventually(t, "the sweep has returned", func() bool { return len(r.o.Pool.Stuck()) == 0 })
	if isGone(r.recordOf("a")) {
		t.Error("the record of the registration is gone")
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

func TestSweepWithoutADirectory(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	os.RemoveAll(w.root)
	if removed, err := r.Sweep(t.Context(), []string{"a"}); err != nil || removed != nil {
		t.Errorf("%v, %v", removed, err)
	}
}
