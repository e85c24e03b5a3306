package fswatch

import "slices"

// watch is one watched directory: which routes are interested in which names in it.
// The name "" stands for every entry.
type watch map[string][]*route

// register makes r interested in a name in the directory that wd watches. w.mu is held.
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

// settle ends all interest of r but that in keep, and returns the watches that nobody needs any
// more. The caller removes those without w.mu, for that may release the last reference to a
// directory. Who adds such a watch meanwhile learns from IN_IGNORED that it is gone. w.mu is held.
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
