package kubelet

import (
	"os"
	"slices"
	"testing"
	"time"
)

// Whatever a killed process or a failed publication left is removed, and never a socket that is
// about to be published.
func TestTemporaryNames(t *testing.T) {
	w := newWorld(t)
	r, s := w.published("ours")
	ours := s.current.Load().Bound
	if isGone(ours) {
		t.Fatal("the temporary name of a publication is gone already")
	}
	file := func(path string) string {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	name := func(path string) string { return w.dir + "/" + temporaryPrefix + path }
	deadSocket(t, name("0123dead"))
	deadSocket(t, name("another"))
	held := listen(t, name("00000001")) // by a publication, or by the descriptor store
	kept := []string{name("another"), name("00000001"), file(name("00000002"))}
	deadSocket(t, name("00000003")) // not seen before
	old := time.Now().Add(-temporaryFor)
	before := temporaryNames{ours: old, name("0123dead"): old, name("another"): old, name("00000001"): old, name("00000002"): old}

	left := r.removeTemporary(t.Context(), before)
	if !left.young() {
		t.Error("a new name is not examined in time")
	}
	if !isGone(ours) || !isGone(name("0123dead")) || isGone(name("00000003")) || slices.ContainsFunc(kept, isGone) {
		t.Errorf("left: %q", w.temporaryNames())
	}
	mustAnswer(t, s.path, announcement("ours").Endpoint)

	// The descriptor store has closed its copy.
	held.Close()
	before[name("00000003")] = old
	if left := r.removeTemporary(t.Context(), before); left.young() || !isGone(name("00000001")) || !isGone(name("00000003")) {
		t.Errorf("left: %q", w.temporaryNames())
	}
}

// A publication that hangs before its socket gets its name keeps the temporary one, however long
// that takes.
func TestTemporaryNameOfAPublicationThatHangs(t *testing.T) {
	w := newWorld(t)
	host := newHost()
	begun, release := make(chan string), make(chan struct{})
	move := host.MoveIntoPlace
	host.MoveIntoPlace = func(from, to string) error {
		begun <- from
		<-release
		return move(from, to)
	}
	r := w.open(func(o *Options) { o.Host = host })
	s := socket(t, r, "a")
	done := make(chan error, 1)
	go func() { done <- s.Publish(t.Context(), announcement("a")) }()
	temporary := <-begun
	left := r.removeTemporary(t.Context(), temporaryNames{temporary: time.Now().Add(-temporaryFor)})
	if len(left) != 1 || isGone(temporary) {
		t.Error("the temporary name is removed")
	}
	close(release)
	if err := <-done; err != nil {
		t.Error(err)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

// A process that was killed soon after a publication, and the next one has another root_dir: no
// scan looks below the earlier one.
func TestTemporaryNameBelowAnEarlierRootDir(t *testing.T) {
	w, m := left(t, "a")
	rec, err := newHost().readRecord(recordsIn(w.run) + "/a.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Link(rec.Path, rec.Bound); err != nil { // it was not removed
		t.Fatal(err)
	}
	other := newWorld(t)
	r := w.open(with(m, true), func(o *Options) { o.Dir = other.dir })
	s := socket(t, r, "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
		t.Error(err)
	}
	if !isGone(rec.Path) || !isGone(rec.Bound) {
		t.Errorf("path gone %t, temporary name gone %t", isGone(rec.Path), isGone(rec.Bound))
	}
}
