package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// maxFile is the largest file that is read, in bytes. A thousand drivers fit.
const maxFile = 1 << 20

// Source says which files make the configuration.
type Source struct {
	Root string // --config-root: where etc, run and usr/lib are; default "/"
	File string // --config: that file alone, and no questions about its owner
}

// The places of configuration files, the one that hides the others first (spec §3).
const (
	etc = iota
	run
	lib
)

// file is a file that may hold configuration.
type file struct {
	path   string
	place  int // etc, run or lib
	dropIn bool
	rank   int // its turn in the order of application, from 0
}

// folder is a place's folder.
func (s Source) folder(place int) string {
	root := s.Root
	if root == "" {
		root = "/"
	}
	dir := [...]string{etc: "etc", run: "run", lib: "usr/lib"}[place]
	return filepath.Join(root, dir, "csi-registrar")
}

// Watch lists the paths that a watcher must follow, through all folders above them, to
// see every change that matters: the main files, the conf.d folders with what is in them,
// and the drop-ins that are links now. Some or all of them may not exist.
func (s Source) Watch() []string {
	paths := []string{s.File}
	if s.File == "" {
		paths = nil
		for _, place := range []int{etc, run, lib} {
			paths = append(paths, filepath.Join(s.folder(place), "config.toml"),
				filepath.Join(s.folder(place), "conf.d"))
		}
		for _, f := range s.list().files {
			// Not what a mask leads to: /dev/null is written to all the time.
			if to, err := os.Stat(f.path); f.dropIn && isLink(f.path) && (err != nil || to.Mode().IsRegular()) {
				paths = append(paths, f.path)
			}
		}
	}
	for i, p := range paths {
		// It fails only where the working folder is gone; nothing can be watched there.
		if abs, err := filepath.Abs(p); err == nil {
			paths[i] = abs
		}
	}
	return paths
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().Type() == fs.ModeSymlink
}

// Hidden is a file that does not count because of another.
type Hidden struct {
	File string `json:"file"`
	By   string `json:"by"`
}

// listing is what is in the folders.
type listing struct {
	files    []file // those that count, in the order in which they are applied
	hidden   []Hidden
	mistakes []Mistake // folders that cannot be read
}

// list looks what there is.
func (s Source) list() listing {
	if s.File != "" {
		return listing{files: []file{{path: s.File}}}
	}
	var l listing
	for _, place := range []int{etc, run, lib} {
		main := filepath.Join(s.folder(place), "config.toml")
		// Whatever is wrong with a file that is there is found when it is read.
		switch _, err := os.Lstat(main); {
		case errors.Is(err, fs.ErrNotExist):
		case len(l.files) > 0:
			l.hidden = append(l.hidden, Hidden{main, l.files[0].path})
		default:
			l.files = append(l.files, file{path: main, place: place})
		}
	}
	s.dropIns(&l)
	for i := range l.files {
		l.files[i].rank = i
	}
	return l
}

// dropIns adds the drop-ins by file name. A name in one place hides the same name in the
// next ones, whatever is in the file: this is also how an empty one masks.
func (s Source) dropIns(l *listing) {
	byName := make(map[string]file)
	for _, place := range []int{etc, run, lib} {
		dir := filepath.Join(s.folder(place), "conf.d")
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.mistakes = append(l.mistakes, cannotRead(dir, err))
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
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		l.files = append(l.files, byName[name])
	}
}

// trusted lists the users whose files are believed: root. Below another root than /
// also the one who runs this: tests and image builds work there without root, and who
// chose that root chose its files.
func (s Source) trusted() []uint32 {
	if root := filepath.Clean(s.Root); root == "/" || s.Root == "" {
		return []uint32{0}
	}
	return []uint32{0, uint32(os.Geteuid())}
}

// read gives what is in a file. A link to /dev/null is an empty file.
func (s Source) read(f file) (string, *Mistake) {
	var owners []uint32
	if s.File == "" {
		owners = s.trusted()
	}
	return readFile(f.path, maxFile, owners)
}

// readFile reads a file of at most most bytes that belongs to one of the owners and that
// nobody else may write; with no owners, anybody's.
func readFile(path string, most int64, owners []uint32) (string, *Mistake) {
	wrong := func(problem, hint string) (string, *Mistake) {
		return "", &Mistake{File: path, Problem: problem, Hint: hint}
	}
	// Everybody may write to /dev/null, and in an image it may be missing: of a link to
	// it the link's own owner counts.
	if isNull(path) {
		info, err := os.Lstat(path)
		if err != nil {
			m := cannotRead(path, err)
			return "", &m
		}
		return "", untrusted(path, info, owners)
	}
	// O_NONBLOCK: a pipe would hold us up for ever.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		m := cannotRead(path, err)
		return "", &m
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		m := cannotRead(path, err)
		return "", &m
	case info.IsDir():
		return wrong("is a folder", "must be a file")
	case !info.Mode().IsRegular():
		return wrong("is not a regular file", "must be a file, or a link to one or to /dev/null")
	}
	if m := untrusted(path, info, owners); m != nil {
		return "", m
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	switch {
	case err != nil:
		m := cannotRead(path, err)
		return "", &m
	case int64(len(data)) > most:
		return wrong(fmt.Sprintf("is larger than %d MiB", most>>20), "this is not a configuration file of csi-registrar")
	}
	return string(data), nil
}

// isNull tells whether a path leads to /dev/null.
func isNull(path string) bool {
	if target, err := os.Readlink(path); err == nil && target == os.DevNull {
		return true
	}
	null, err := os.Stat(os.DevNull)
	if err != nil {
		return false
	}
	info, err := os.Stat(path)
	return err == nil && os.SameFile(info, null)
}

// untrusted tells why a file may not be believed, nil if it may.
func untrusted(path string, info fs.FileInfo, owners []uint32) *Mistake {
	if owners == nil {
		return nil
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return &Mistake{File: path, Problem: "its owner cannot be found out"}
	}
	if !slices.Contains(owners, st.Uid) {
		chown := "chown root "
		if info.Mode()&fs.ModeSymlink != 0 {
			chown = "chown -h root "
		}
		return &Mistake{File: path, Problem: fmt.Sprintf("belongs to uid %d, not to root", st.Uid),
			Hint: "look what is in it, then: " + chown + printable(path)}
	}
	// The mode of a link says nothing.
	if mode := info.Mode(); mode.IsRegular() && mode.Perm()&0o022 != 0 {
		return &Mistake{File: path, Problem: fmt.Sprintf("its group or others may write it (mode %04o)", mode.Perm()),
			Hint: "look what is in it, then: chmod go-w " + printable(path)}
	}
	return nil
}

// cannotRead is the mistake of a file or folder that the system does not let us read.
func cannotRead(path string, err error) Mistake {
	m := Mistake{File: path, Problem: "cannot be read: " + err.Error()}
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		m.Problem = "cannot be read: " + pathErr.Err.Error()
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		m.Hint = "try again as root"
	case errors.Is(err, fs.ErrNotExist):
		m.Hint = "make the file, or name another"
		if _, linkErr := os.Readlink(path); linkErr == nil {
			m.Hint = "it is a link to a file that does not exist"
		}
	}
	return m
}
