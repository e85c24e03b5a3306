package config

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/trust"
)

// maxFile is the largest file that is read, in bytes. A thousand drivers fit.
const maxFile = 1 << 20

// rule says which files of the Source are believed. Below another root than / its own user is
// trusted beside root: tests and image builds work there without root, and who chose that root
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

// readDir lists the names in a directory, sorted. What does not exist is empty.
func readDir(r trust.Rule, path string) (names []string, bad *Error) {
	if err := r.Check(path); err != nil {
		return nil, fileError(path, err)
	}
	dir, err := os.OpenFile(path, syscall.O_DIRECTORY, 0) // os.ReadDir would wait for a pipe's other end
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

// read reads a file. The text is given with an error, too, if the file can be read but not be
// trusted. A link to /dev/null is an empty file.
func read(r trust.Rule, path string) (text string, bad *Error) {
	err := r.Check(path)
	if isNull(path) {
		return "", fileError(path, err)
	}
	data, readErr := r.ReadFile(path, maxFile)
	return string(data), fileError(path, cmp.Or(err, readErr))
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

// fileError is the error of a file or directory that is not to be trusted, or that the system
// does not let us read; nil if err is.
func fileError(path string, err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*trust.Error](err); ok {
		bad := &Error{File: e.Path, Problem: e.Problem}
		if e.Command.Name != "" {
			bad.Hint = "look what is in it, then run " + e.Command.String()
		}
		return bad
	}
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
