package fswatch

import (
	"path/filepath"
	"slices"
)

// Subscription is a place for hints about some paths. The holder may put hints into it
// too (Hint), so that one channel serves all that it waits for, with no goroutine to
// merge them.
type Subscription struct {
	hints chan struct{}
	w     *Watcher
	paths []string // absolute and clean
	dir   bool     // entries of the paths and what files hold count as well

	// The watcher's, under its lock.
	chain   []*entry  // what was followed on the way to the paths
	folders []*folder // with dir: the paths themselves, as far as they are folders
	gen     uint64    // the round in which it was marked last
	closed  bool
}

// Hints receives when something may have changed. It has capacity one: a hint is never
// lost, many are one. It is never closed.
func (s *Subscription) Hints() <-chan struct{} { return s.hints }

// Hint puts a hint in, as the watcher does. It never blocks.
func (s *Subscription) Hint() {
	select {
	case s.hints <- struct{}{}:
	default: // one is waiting already
	}
}

// Close ends the watcher's hints. It may be called at any time and more than once.
func (s *Subscription) Close() {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.drop(s)
}

// Subscribe gives hints when one of the paths, or any folder on the way to one, appears,
// vanishes, is renamed, replaced or mounted over, or its mode or owner changes. Symbolic
// links are followed, and watched too. Nothing on the way needs to exist.
//
// If the watcher runs, the watches are in place on return, so that a look after it misses
// nothing. If not, a hint comes when it starts.
func (w *Watcher) Subscribe(paths ...string) *Subscription { return w.subscribe(false, paths) }

// SubscribeDir is Subscribe, and also gives hints when an entry of one of the paths
// appears, vanishes or changes: name, mode, owner, or content once a writer closed it.
// Where a path is a file, so does its content.
func (w *Watcher) SubscribeDir(paths ...string) *Subscription { return w.subscribe(true, paths) }

func (w *Watcher) subscribe(dir bool, paths []string) *Subscription {
	s := &Subscription{hints: make(chan struct{}, 1), w: w, dir: dir}
	for _, p := range paths {
		// Everything that is watched has an absolute path; Join also cleans it.
		if p = filepath.Join("/", p); !slices.Contains(s.paths, p) {
			s.paths = append(s.paths, p)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.subs[s] = struct{}{}
	if w.running {
		w.begin()
		w.walk(s)
		w.settle()
	}
	return s
}
