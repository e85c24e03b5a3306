package fswatch

import (
	"path/filepath"
	"slices"

	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
)

// watch is a watched directory: the routes that are interested in each name in it. The name ""
// stands for every entry.
type watch map[string][]*route

// register makes r interested in a name in the directory that wd watches. w.mu must be held.
func (w *Watcher) register(r *route, wd int32, name string) {
	if slices.ContainsFunc(r.steps, func(s step) bool { return s.wd == wd && s.name == name }) {
		return
	}
	c := w.watches[wd]
	if c == nil {
		c = make(watch)
		w.watches[wd] = c
	}
	c[name] = append(c[name], r)
	r.steps = append(r.steps, step{wd: wd, name: name})
}

// settle ends all interest of r except that in keep, and returns the watches that are no longer
// needed. The caller removes them without holding w.mu, because that may release the last reference
// to a directory. A walk that adds such a watch meanwhile learns from IN_IGNORED that it is gone.
// w.mu must be held.
func (w *Watcher) settle(r *route, keep []step) (unused []int32) {
	for _, old := range r.steps {
		if slices.ContainsFunc(keep, func(s step) bool { return s.wd == old.wd && s.name == old.name }) {
			continue
		}
		c := w.watches[old.wd]
		if i := slices.Index(c[old.name], r); i >= 0 {
			c[old.name] = slices.Delete(c[old.name], i, i+1)
			if len(c[old.name]) == 0 {
				delete(c, old.name)
			}
			if len(c) == 0 {
				delete(w.watches, old.wd)
				unused = append(unused, old.wd)
			}
		}
	}
	r.steps = keep
	return unused
}

// Subscription receives hints about some paths. Its owner may add other hints (Hint), so that one
// channel is enough to wait for everything.
type Subscription struct {
	hints   chan struct{}
	w       *Watcher
	content bool // entries of the paths, and the content of files, count as well
	routes  []*route
	closed  bool // under the Watcher's lock
}

// route is one path of a Subscription. It is walked by one goroutine at a time.
type route struct {
	sub  *Subscription
	path string // absolute and clean
	slot *worker.Slot

	// Under the Watcher's lock.
	steps []step // the names on the way to the path
	// the real paths of the links on the way, and of its end; those above are on the way, too
	ways    []string
	fresh   bool // a walk found something new since the mounts were read
	walking bool
	walks   rate.Bucket
	again   bool // something happened since the walk began
	hint    bool // a hint follows the next walk, whatever it finds
	hanging bool // the last walk did not come back in time
}

// Hints receives when something may have changed. It has capacity one: no hint is lost, and several
// become one. It is never closed.
func (s *Subscription) Hints() <-chan struct{} { return s.hints }

// Hint adds a hint, as the Watcher does. It never blocks.
func (s *Subscription) Hint() { rate.Hint(s.hints) }

// Close ends the Watcher's hints without waiting for walks. It may be called at any time and more
// than once.
func (s *Subscription) Close() {
	w := s.w
	w.mu.Lock()
	n := w.inotify
	s.closed = true
	var unused []int32
	for _, r := range s.routes {
		delete(w.routes, r)
		unused = append(unused, w.settle(r, nil)...)
		w.setPolled(r, nil)
	}
	w.mu.Unlock()
	removeAll(n, unused)
}

// Subscribe gives hints when one of the paths, or any directory on the way to it, is created,
// removed, renamed, replaced or mounted over, or its mode or owner changes. Symbolic links are
// followed, and watched too. Nothing on the way needs to exist.
//
// It does not wait. Once the Watcher runs, the first hint comes when a path is watched (or its file
// system did not answer in time): a receiver that looks at each hint misses nothing.
func (w *Watcher) Subscribe(paths ...string) *Subscription { return w.subscribe(false, paths) }

// SubscribeDir is Subscribe, and also gives hints when an entry of one of the paths is created,
// removed, or changes its name, mode or owner, or its content once a writer has closed it. If a
// path is a file, its content counts.
func (w *Watcher) SubscribeDir(paths ...string) *Subscription { return w.subscribe(true, paths) }

func (w *Watcher) subscribe(content bool, paths []string) *Subscription {
	s := &Subscription{hints: make(chan struct{}, 1), w: w, content: content}
	for _, p := range paths {
		p = filepath.Join("/", p) // everything that is watched has an absolute path
		if slices.ContainsFunc(s.routes, func(r *route) bool { return r.path == p }) {
			continue
		}
		r := &route{sub: s, path: p, walks: rate.Bucket{Burst: walksAtOnce, Interval: walkEvery}}
		r.slot = w.pool.Slot(p, func() { // a call about the path that hung has returned
			w.mu.Lock()
			defer w.mu.Unlock()
			w.walkSoon(r, true)
		})
		s.routes = append(s.routes, r)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range s.routes {
		w.routes[r] = struct{}{}
		w.walkSoon(r, true)
	}
	return s
}
