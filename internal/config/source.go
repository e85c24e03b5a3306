package config

import (
	"cmp"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/trust"
)

// Source says which files make the configuration.
type Source struct {
	Root string // --config-root: where etc, run and usr/lib are; default "/"
	File string // --config: that file alone, and no questions about its owner
}

// places are where configuration files are, the one that hides the others first.
var places = [...]string{"etc", "run", "usr/lib"}

// file is a file that may hold configuration.
type file struct {
	path   string
	dropIn bool
	rank   int // its turn in the order of application, from 0
}

func (s Source) root() string { return absolutePath(cmp.Or(s.Root, "/")) }

// dir is the directory of a place.
func (s Source) dir(place string) string {
	return filepath.Join(s.root(), place, "csi-registrar")
}

// Watch lists the paths that a watcher must follow, through all directories above them, to
// see every change that matters: the main files, and the conf.d directories with what is
// in them. Some or all of them may not exist. Result.Links are to be watched beside them.
func (s Source) Watch() []string {
	if s.File != "" {
		return []string{absolutePath(s.File)}
	}
	var paths []string
	for _, place := range places {
		paths = append(paths, filepath.Join(s.dir(place), "config.toml"), filepath.Join(s.dir(place), "conf.d"))
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

// list returns the files that count, in the order in which they are applied, and notes the
// hidden ones, the links, and directories that cannot be read or not be trusted. A name in one
// place hides the same name in the next ones, whatever is in the file: this is also how an empty
// one masks.
func (s Source) list(rule trust.Rule, r *Result) (files []file) {
	if s.File != "" {
		return []file{{path: s.File}}
	}
	byName := make(map[string]file) // the main file has no name, and so comes first
	add := func(name string, f file) {
		if by, hidden := byName[name]; hidden {
			r.Hidden = append(r.Hidden, Hidden{f.path, by.path})
		} else {
			byName[name] = f
		}
	}
	for _, place := range places {
		// Nothing that is in a directory counts that others may write.
		if err := rule.Check(s.dir(place)); err != nil {
			r.Errors = append(r.Errors, *fileError(s.dir(place), err))
			continue
		}
		main := filepath.Join(s.dir(place), "config.toml")
		// Whatever is wrong with a file that is there is found when it is read.
		if _, err := os.Lstat(main); !errors.Is(err, fs.ErrNotExist) {
			add("", file{path: main})
		}
		dir := filepath.Join(s.dir(place), "conf.d")
		names, e := readDir(rule, dir)
		if e != nil {
			r.Errors = append(r.Errors, *e)
		}
		for _, name := range names {
			if !strings.HasPrefix(name, ".") && strings.HasSuffix(name, ".toml") {
				add(name, file{path: filepath.Join(dir, name), dropIn: true})
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		f := byName[name]
		f.rank = len(files)
		files = append(files, f)
		// Not what a mask points to: /dev/null is written to all the time.
		if _, err := os.Readlink(f.path); f.dropIn && err == nil && !isNull(f.path) {
			r.Links = append(r.Links, f.path)
		}
	}
	return files
}
