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
	"syscall"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
)

// Source selects the configuration files.
type Source struct {
	Root string // --config-root: the directory with etc, run and usr/lib; default "/"
	File string // --config: only this file, whoever owns it
}

// places are the directories with configuration files. A file hides those of the same name in later
// places.
var places = [...]string{"etc", "run", "usr/lib"}

func (s Source) root() string { return absolutePath(cmp.Or(s.Root, "/")) }

// dir returns the directory of a place.
func (s Source) dir(place string) string {
	return filepath.Join(s.root(), place, "csi-registrar")
}

// Watch returns the paths to watch, with all directories above them, for changes of the
// configuration: the main files, and the conf.d directories with their entries. They may not
// exist. Watch Result.Links, too.
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
	// It fails only if the working directory was removed; nothing can be watched there.
	abs, _ := filepath.Abs(path)
	return cmp.Or(abs, path)
}

// Hidden is a file that is not read because of another one.
type Hidden struct {
	File string
	By   string
}

// list returns the files to read, in the order in which they are applied. It adds to r the hidden
// files, the links, and errors for directories that cannot be read or trusted, or for a missing
// root. A file hides those of the same name in later places, whatever its content, so that an empty
// file masks them.
func (s Source) list(rule trust.Rule, r *Result) (files []string) {
	if s.File != "" {
		return []string{s.File}
	}
	if _, err := os.Stat(s.root()); err != nil {
		e := fileError(s.root(), err)
		e.Hint = "--config-root takes the directory that has etc, run and usr/lib"
		r.Errors = append(r.Errors, *e)
		return nil
	}
	byName := make(map[string]string) // the name of the main file is empty, so that it comes first
	add := func(name, path string) {
		if by, hidden := byName[name]; hidden {
			r.Hidden = append(r.Hidden, Hidden{path, by})
		} else {
			byName[name] = path
		}
	}
	for _, place := range places {
		// Ignore all files in a directory that others may write to.
		if err := rule.Check(s.dir(place)); err != nil {
			r.Errors = append(r.Errors, *fileError(s.dir(place), err))
			continue
		}
		main := filepath.Join(s.dir(place), "config.toml")
		// All other errors are found when the file is read.
		if _, err := os.Lstat(main); !errors.Is(err, fs.ErrNotExist) {
			add("", main)
		}
		dir := filepath.Join(s.dir(place), "conf.d")
		names, e := readDir(rule, dir)
		if e != nil {
			r.Errors = append(r.Errors, *e)
		}
		for _, name := range names {
			if !strings.HasPrefix(name, ".") && strings.HasSuffix(name, ".toml") {
				add(name, filepath.Join(dir, name))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		path := byName[name]
		files = append(files, path)
		// Do not watch /dev/null, which is written to all the time.
		if _, err := os.Readlink(path); err == nil && !isNull(path) {
			r.Links = append(r.Links, path)
		}
	}
	return files
}

// maxFile is the maximum size of a file in bytes, enough for a thousand drivers.
const maxFile = 1 << 20

// rule returns which files of the Source are trusted. Below a root other than / the current user is
// trusted, too: tests and image builds run without root, and the user who chose that root also
// chose its files.
func (s Source) rule() trust.Rule {
	r := trust.Rule{Owners: []uint32{0}, Below: s.root(), FollowLink: true}
	if s.File != "" {
		r.Owners = nil
	} else if r.Below != "/" {
		r.Owners = append(r.Owners, uint32(os.Geteuid()))
	}
	return r
}

// readDir returns the sorted names in a directory; none if it does not exist.
func readDir(r trust.Rule, path string) (names []string, _ *Error) {
	if err := r.Check(path); err != nil {
		return nil, fileError(path, err)
	}
	// os.ReadDir would wait for a pipe's other end
	dir, err := os.OpenFile(path, syscall.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		defer dir.Close()
		names, err = dir.Readdirnames(-1)
	}
	slices.Sort(names)
	return names, fileError(path, err)
}

// read reads a trusted file. A link to /dev/null is an empty file.
func read(r trust.Rule, path string) (string, *Error) {
	if err := r.Check(path); err != nil || isNull(path) {
		return "", fileError(path, err)
	}
	data, err := r.ReadFile(path, maxFile)
	return string(data), fileError(path, err)
}

// isNull reports whether a path points to /dev/null, which may be missing in an image.
func isNull(path string) bool {
	if target, err := os.Readlink(path); err == nil && target == os.DevNull {
		return true
	}
	info, err := os.Stat(path)
	null, nullErr := os.Stat(os.DevNull)
	return err == nil && nullErr == nil && os.SameFile(info, null)
}

// fileError returns the Error for a file or directory that is untrusted or cannot be read; nil if
// err is nil.
func fileError(path string, err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*trust.Error](err); ok {
		distrusted := &Error{File: e.Path, Problem: e.Problem, Command: e.Command}
		if e.Command.Name != "" {
			distrusted.Hint = "check its contents, then run " + e.Command.String()
		}
		return distrusted
	}
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		err = pathErr.Err
	}
	e := &Error{File: path, Problem: "cannot be read: " + safetext.Clean(err.Error(), maxCause)}
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.Hint = "try again as root; the daemon needs a mode by which root may read it"
	case errors.Is(err, fs.ErrNotExist):
		e.Hint = "create the file, or remove the link to it"
	}
	return e
}
