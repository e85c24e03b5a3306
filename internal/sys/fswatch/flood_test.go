package fswatch

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A path that changes all the time costs a limited number of reads and walks, and its final state
// is seen.
func TestAPathThatChangesAllTheTime(t *testing.T) {
	dir := tempDir(t)
	path := filepath.Join(dir, "d", "csi.sock")
	must(t, os.Mkdir(filepath.Dir(path), 0o755))
	var reads, walks atomic.Int64
	begun := time.Now() // before the first read can be made
	w := start(t, func(w *Watcher) {
		lstat := w.calls.lstat
		w.calls.lstat = func(p string, st *unix.Stat_t) error {
			if p == path {
				walks.Add(1)
			}
			return lstat(p, st)
		}
		w.open = func() (notifier, error) {
			n, err := openInotify()
			return countingNotifier{n, &reads}, err
		}
	})
	s := subscribe(t, w.Subscribe, path)
	defer s.Close()
	changes := 0
	for ; time.Since(begun) < time.Second; changes++ {
		must(t, os.Chmod(filepath.Dir(path), 0o755-os.FileMode(changes%2)))
		time.Sleep(time.Microsecond) // so that the watcher could read each by itself
	}
	must(t, os.WriteFile(path, nil, 0o600))
	within(t, "the last change is not seen", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		r := s.routes[0]
		return len(r.steps) > 0 && r.steps[len(r.steps)-1].seen.kind() == unix.S_IFREG
	})
	read, walked := reads.Load(), walks.Load()
	took := time.Since(begun)
	t.Logf("%d changes, %d reads, %d walks in %s", changes, read, walked, took)
	if most := readsAtOnce + 3 + int64(took/readEvery); read > most {
		t.Errorf("%d reads in %s, at most %d are right", read, took, most)
	}
	if most := walksAtOnce + 3 + int64(took/walkEvery); walked > most {
		t.Errorf("%d walks in %s, at most %d are right", walked, took, most)
	}
}

type countingNotifier struct {
	notifier
	reads *atomic.Int64
}

func (n countingNotifier) read(buf []byte) (int, error) {
	n.reads.Add(1)
	return n.notifier.read(buf)
}
