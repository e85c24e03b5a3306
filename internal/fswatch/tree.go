package fswatch

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks is how many symbolic links the kernel follows in one path (path_resolution(7)).
const maxLinks = 40

// folder is a real folder (no symbolic link on its path) in which names are watched.
type folder struct {
	path    string
	wd      int32 // -1: not watched
	entries map[string]*entry
	subs    []*Subscription // those that want every entry
	mtime   int64           // of the last look, for those
	content bool            // somebody wants to know what is written to a file in it
	gen     uint64          // the round in which its watch was verified
}

// entry is a name in a folder that somebody waits for: whether it exists or not.
type entry struct {
	folder *folder
	name   string
	subs   []*Subscription
	seen   state
	gen    uint64 // the round in which it was looked at
}

// state is what tells one file from another at the same name. The inode number alone does
// not: ext4 gives that of a removed file to the next one; then the change time differs. It
// is left out where it also changes by use: folders, and files that are written to.
type state struct {
	errno          unix.Errno // ENOENT, usually; the rest is zero then
	dev, ino       uint64
	mode, uid, gid uint32
	ctime          int64
}

func (s state) kind() uint32 { return s.mode & unix.S_IFMT }

func look(path string) (s state, mtime int64) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		if !errors.As(err, &s.errno) {
			s.errno = unix.EIO
		}
		return s, 0
	}
	s = state{dev: st.Dev, ino: st.Ino, mode: st.Mode, uid: st.Uid, gid: st.Gid}
	if s.kind() == unix.S_IFSOCK || s.kind() == unix.S_IFLNK {
		s.ctime = st.Ctim.Nano()
	}
	return s, st.Mtim.Nano()
}

// A round begins, marks what is to be followed anew and hinted, and settles. Within one
// nothing is looked at twice: folders are watched from the top before they are looked
// into, so whatever changes after a look makes an event, and that another round. Hints
// come last, so whoever looks because of one sees at least what the round saw.

func (w *Watcher) begin() {
	w.gen++
	w.marked = w.marked[:0]
}

func (w *Watcher) mark(subs ...*Subscription) {
	for _, s := range subs {
		if s.gen != w.gen && !s.closed {
			s.gen = w.gen
			w.marked = append(w.marked, s)
		}
	}
}

func (w *Watcher) markFolder(f *folder) {
	for _, e := range f.entries {
		e.gen = 0
		w.mark(e.subs...)
	}
	w.mark(f.subs...)
}

func (w *Watcher) settle() {
	for i := 0; i < len(w.marked); i++ { // walking may mark more
		w.walk(w.marked[i])
	}
	for _, s := range w.marked {
		s.Hint()
	}
	clear(w.marked)
	w.tellDegraded()
}

// walk follows the paths of s and keeps it subscribed to what is on the way.
func (w *Watcher) walk(s *Subscription) {
	var (
		chain   = make([]*entry, 0, cap(s.chain))
		folders []*folder
	)
	for _, p := range s.paths {
		var (
			end string
			in  *folder
		)
		chain, end, in = w.follow(chain, p)
		switch {
		case !s.dir:
		case end != "":
			folders = append(folders, w.folder(end))
		case in != nil && !in.content:
			in.content = true
			w.rewatch(in)
		}
	}
	was, wasIn := s.chain, s.folders
	s.chain, s.folders = chain, folders
	for _, f := range folders {
		if !slices.Contains(f.subs, s) {
			f.subs = append(f.subs, s)
			w.rewatch(f)
			_, f.mtime = look(f.path)
		}
	}
	for _, e := range chain {
		if !slices.Contains(was, e) {
			e.subs = append(e.subs, s)
		}
	}
	w.release(s, was, wasIn)
}

// follow appends to chain each entry that is passed on the way to path, and returns the
// folder that path is, or "", and then the one that it is in, if the way leads so far.
func (w *Watcher) follow(chain []*entry, path string) (_ []*entry, end string, in *folder) {
	dir, links := "/", 0
	for path != "" {
		var name string
		name, path, _ = strings.Cut(path, "/")
		switch name {
		case "", ".":
			continue
		case "..": // in a link's target; dir is real, so its parent is its path's
			dir = filepath.Dir(dir)
			continue
		}
		e := w.entry(dir, name)
		w.observe(e)
		if !slices.Contains(chain, e) {
			chain = append(chain, e)
		}
		switch e.seen.kind() {
		case unix.S_IFDIR:
			dir = filepath.Join(dir, name)
		case unix.S_IFLNK:
			target, err := os.Readlink(filepath.Join(dir, name))
			if links++; err != nil || links > maxLinks {
				return chain, "", nil // changed under us, which makes an event; or a loop
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			path = target + "/" + path
		default: // nothing there, or no folder: there can be nothing below
			if path == "" {
				in = e.folder
			}
			return chain, "", in
		}
	}
	return chain, dir, nil
}

// observe looks at an entry and marks everybody who waits for it if it changed.
func (w *Watcher) observe(e *entry) {
	if e.gen == w.gen {
		return
	}
	e.gen = w.gen
	if now, _ := look(filepath.Join(e.folder.path, e.name)); now != e.seen {
		e.seen = now
		w.mark(e.subs...)
	}
}

func (w *Watcher) folder(path string) *folder {
	f := w.folders[path]
	if f == nil {
		f = &folder{path: path, wd: -1, entries: make(map[string]*entry)}
		w.folders[path] = f
	}
	w.watch(f)
	return f
}

func (w *Watcher) entry(dir, name string) *entry {
	f := w.folder(dir)
	e := f.entries[name]
	if e == nil {
		e = &entry{folder: f, name: name}
		f.entries[name] = e
	}
	return e
}

// watch makes sure that the folder that is at f.path now is the one that is watched.
func (w *Watcher) watch(f *folder) {
	if f.gen == w.gen {
		return
	}
	f.gen = w.gen
	mask := uint32(watchMask)
	if len(f.subs) > 0 || f.content {
		mask |= contentMask
	}
	wd, err := int32(-1), w.noInotify
	if w.inotify != nil {
		wd, err = w.inotify.add(f.path, mask)
	}
	switch {
	case err == nil:
		delete(w.blind, f)
		if wd == f.wd {
			return
		}
		w.unwatch(f)
		f.wd = wd
		w.byWD[wd] = append(w.byWD[wd], f)
		w.markFolder(f) // seen before it was watched, or in another folder of that name
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		w.unwatch(f) // it vanished, which its own entry tells
		delete(w.blind, f)
	default:
		w.unwatch(f)
		w.blind[f] = err
	}
}

// rewatch makes the watch of a folder tell more.
func (w *Watcher) rewatch(f *folder) {
	f.gen = 0
	w.watch(f)
}

func (w *Watcher) unwatch(f *folder) {
	if f.wd < 0 {
		return
	}
	if left := without(w.byWD[f.wd], f); len(left) > 0 {
		w.byWD[f.wd] = left // the same folder under another name
	} else {
		delete(w.byWD, f.wd)
		if w.inotify != nil {
			w.inotify.remove(f.wd)
		}
	}
	f.wd = -1
}

// release ends what s does not follow any more, and forgets what nobody follows.
func (w *Watcher) release(s *Subscription, chain []*entry, folders []*folder) {
	for _, f := range folders {
		if !slices.Contains(s.folders, f) {
			f.subs = without(f.subs, s)
			w.forget(f)
		}
	}
	for _, e := range chain {
		if slices.Contains(s.chain, e) {
			continue
		}
		if e.subs = without(e.subs, s); len(e.subs) == 0 && e.folder.entries[e.name] == e {
			delete(e.folder.entries, e.name)
			w.forget(e.folder)
		}
	}
}

func (w *Watcher) forget(f *folder) {
	if len(f.entries) > 0 || len(f.subs) > 0 || w.folders[f.path] != f {
		return
	}
	w.unwatch(f)
	delete(w.blind, f)
	delete(w.folders, f.path)
}

func (w *Watcher) drop(s *Subscription) {
	if s.closed {
		return
	}
	s.closed = true
	delete(w.subs, s)
	chain, folders := s.chain, s.folders
	s.chain, s.folders = nil, nil
	w.release(s, chain, folders)
	if w.running {
		w.tellDegraded()
	}
}

// without removes one x; the order does not matter.
func without[T comparable](list []T, x T) []T {
	i := slices.Index(list, x)
	if i < 0 {
		return list
	}
	var none T
	last := len(list) - 1
	list[i], list[last] = list[last], none
	return list[:last]
}
