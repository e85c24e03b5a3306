package fswatch

import "slices"

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
