package config

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"csi-registrar/internal/safetext"
)

// maxFile is the largest file that is read, in bytes. A thousand drivers fit.
const maxFile = 1 << 20

// maxLinks is how many symbolic links one path may have (path_resolution(7)).
const maxLinks = 40

// trust decides which files are believed: those that nobody but trusted users can have put
// where they are.
type trust struct {
	root   string   // directories that are not below it are not checked
	owners []uint32 // nil: no questions
}

// trust is for the files of the Source. Below another root than / its own user is trusted
// beside root: tests and image builds work there without root, and who chose that root
// chose its files.
func (s Source) trust() *trust {
	t := &trust{root: s.root(), owners: []uint32{0}}
	if s.File != "" {
		t.owners = nil
	} else if t.root != "/" {
		t.owners = append(t.owners, uint32(os.Geteuid()))
	}
	return t
}

// way checks every directory and symbolic link that is passed on the way to path, and path
// itself if it is one. What does not exist is nobody's.
func (t *trust) way(path string) *Error {
	if t.owners == nil {
		return nil
	}
	at, rest, links := "/", absolutePath(path), 0
	if inside, ok := strings.CutPrefix(rest, t.root+"/"); ok {
		at, rest = t.root, inside
	}
	for rest != "" {
		var name string
		switch name, rest, _ = strings.Cut(rest, "/"); name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at) // at is real, so its parent is its path's
			continue
		}
		next := filepath.Join(at, name)
		info, err := os.Lstat(next)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return cannotRead(next, err)
		}
		if t.root == "/" || strings.HasPrefix(next, t.root+"/") {
			passed := strings.Trim(rest, "/") != ""
			if e := t.untrusted(next, info, passed); e != nil && !info.Mode().IsRegular() {
				return e
			}
		}
		if info.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		target, err := os.Readlink(next)
		if links++; err != nil || links > maxLinks {
			return cannotRead(next, cmp.Or(err, error(syscall.ELOOP)))
		}
		if rest = target + "/" + rest; filepath.IsAbs(target) {
			at = "/"
		}
	}
	return nil
}

// untrusted says why a file, a directory or a link is not to be believed, nil if it is. Of a
// sticky directory that is passed on the way, as /tmp, it is enough that the next entry is a
// trusted user's: nobody else can replace that.
func (t *trust) untrusted(path string, info fs.FileInfo, passed bool) *Error {
	uid := info.Sys().(*syscall.Stat_t).Uid // on Linux it is never another type
	switch mode := info.Mode(); {
	case t.owners == nil || mode.Type()&^(fs.ModeDir|fs.ModeSymlink) != 0: // not opened anyway
		return nil
	case !slices.Contains(t.owners, uid):
		return &Error{File: path, Problem: fmt.Sprintf("belongs to uid %d, not to root", uid),
			Hint: "look what is in it before you give it to root"}
	case mode.Type() == fs.ModeSymlink || passed && mode&fs.ModeSticky != 0: // the mode of a link says nothing
	case mode.Perm()&0o022 != 0:
		return &Error{File: path, Problem: fmt.Sprintf("its group or others may write it (mode %04o)", mode.Perm()),
			Hint: "look what is in it, then take the right from them"}
	}
	return nil
}

// readDir lists the names in a directory, sorted. What does not exist is empty.
func (t *trust) readDir(path string) (names []string, bad *Error) {
	if e := t.way(path); e != nil {
		return nil, e
	}
	dir, err := os.OpenFile(path, syscall.O_DIRECTORY, 0) // os.ReadDir would wait for a pipe's other end
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		defer dir.Close()
		names, err = dir.Readdirnames(-1)
	}
	if err != nil {
		return names, cannotRead(path, err)
	}
	slices.Sort(names)
	return names, nil
}

// read reads a file of at most most bytes. The text is given with an error, too, if the
// file can be read but not be trusted. A link to /dev/null is an empty file. Only regular
// files are opened: to open a pipe or a device can do anything.
func (t *trust) read(path string, most int64) (text string, bad *Error) {
	if bad = t.way(path); isNull(path) {
		return "", bad
	}
	var f *os.File
	info, err := os.Stat(path)
	if err == nil && info.Mode().IsRegular() {
		if f, err = os.OpenFile(path, syscall.O_NONBLOCK|syscall.O_NOCTTY, 0); err == nil {
			defer f.Close()
			info, err = f.Stat() // it may be another file now
		}
	}
	if err == nil && !info.Mode().IsRegular() {
		return "", &Error{File: path, Problem: "is not a regular file", Hint: "must be a file, or a link to one or to /dev/null"}
	}
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.LimitReader(f, most+1))
	}
	if bad == nil && err == nil {
		bad = t.untrusted(path, info, false)
	}
	switch {
	case err != nil:
		return "", cannotRead(path, err)
	case int64(len(data)) > most:
		return "", &Error{File: path, Problem: fmt.Sprintf("is larger than %d MiB", most>>20), Hint: notOurs}
	}
	return string(data), bad
}

// isNull reports whether a path points to /dev/null, which in an image may be missing.
func isNull(path string) bool {
	if target, err := os.Readlink(path); err == nil && target == os.DevNull {
		return true
	}
	info, err := os.Stat(path)
	null, nullErr := os.Stat(os.DevNull)
	return err == nil && nullErr == nil && os.SameFile(info, null)
}

// cannotRead is the error of a file or directory that the system does not let us read.
func cannotRead(path string, err error) *Error {
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		err = pathErr.Err
	}
	e := &Error{File: path, Problem: "cannot be read: " + safetext.Clean(err.Error(), maxCause)}
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.Hint = "try again as root"
	case errors.Is(err, fs.ErrNotExist):
		e.Hint = "make the file, or remove the link to it"
	}
	return e
}
