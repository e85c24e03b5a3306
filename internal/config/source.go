package config

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Source says which files make the configuration.
type Source struct {
	Root string // --config-root: where etc, run and usr/lib are; default "/"
	File string // --config: that file alone, and no questions about its owner
}

// The places of configuration files, the one that hides the others first.
const (
	etc = iota
	run
	lib
)

var places = [...]string{etc: "etc", run: "run", lib: "usr/lib"}

// file is a file that may hold configuration.
type file struct {
	path   string
	place  int // etc, run or lib
	dropIn bool
	rank   int // its turn in the order of application, from 0
}

func (s Source) root() string {
	if s.Root == "" {
		return "/"
	}
	return s.Root
}

// dir is the directory of a place.
func (s Source) dir(place int) string {
	return filepath.Join(s.root(), places[place], "csi-registrar")
}

// Watch lists the paths that a watcher must follow, through all directories above them, to
// see every change that matters: the main files, and the conf.d directories with what is
// in them. Some or all of them may not exist. Result.Links are to be watched beside them.
func (s Source) Watch() []string {
	paths := []string{s.File}
	if s.File == "" {
		paths = nil
		for place := range places {
			paths = append(paths, filepath.Join(s.dir(place), "config.toml"), filepath.Join(s.dir(place), "conf.d"))
		}
	}
	for i, p := range paths {
		paths[i] = absolutePath(p)
	}
	return paths
}

func absolutePath(path string) string {
	// It fails only where the working directory is gone; nothing can be watched there.
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// Hidden is a file that does not count because of another.
type Hidden struct {
	File string `json:"file"`
	By   string `json:"by"`
}

// listing is what is in the directories.
type listing struct {
	files  []file // those that count, in the order in which they are applied
	hidden []Hidden
	links  []string // drop-ins that are links to files
	errors []Error  // directories that cannot be read, or not be trusted
}

// list looks what there is.
func (s Source) list(t *trust) listing {
	if s.File != "" {
		return listing{files: []file{{path: s.File}}}
	}
	var l listing
	var mains []file
	dropIns := make(map[string]file)
	for place := range places {
		// Nothing that is in a directory counts that others may write.
		if e := t.way(s.dir(place)); e != nil {
			l.errors = append(l.errors, *e)
			continue
		}
		main := file{path: filepath.Join(s.dir(place), "config.toml"), place: place}
		// Whatever is wrong with a file that is there is found when it is read.
		if _, err := os.Lstat(main.path); !errors.Is(err, fs.ErrNotExist) {
			mains = append(mains, main)
		}
		s.dropIns(&l, dropIns, place, t)
	}
	if len(mains) > 0 {
		l.files = mains[:1]
		for i, f := range mains[1:] {
			l.hidden = slices.Insert(l.hidden, i, Hidden{f.path, mains[0].path})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(dropIns)) {
		l.files = append(l.files, dropIns[name])
	}
	for i := range l.files {
		l.files[i].rank = i
	}
	return l
}

// dropIns adds the drop-ins of a place. A name in one place hides the same name in the
// next ones, whatever is in the file: this is also how an empty one masks.
func (s Source) dropIns(l *listing, byName map[string]file, place int, t *trust) {
	dir := filepath.Join(s.dir(place), "conf.d")
	if e := t.way(dir); e != nil {
		l.errors = append(l.errors, *e)
		return
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		l.errors = append(l.errors, cannotRead(dir, err))
	}
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") || !strings.HasSuffix(name, ".toml") {
			continue
		}
		f := file{path: filepath.Join(dir, name), place: place, dropIn: true}
		if by, hidden := byName[name]; hidden {
			l.hidden = append(l.hidden, Hidden{f.path, by.path})
			continue
		}
		byName[name] = f
		// Not what a mask points to: /dev/null is written to all the time.
		if e.Type() == fs.ModeSymlink && !isNull(f.path) {
			l.links = append(l.links, absolutePath(f.path))
		}
	}
}
