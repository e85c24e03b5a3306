package config

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
)

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
		e.Hint = "try again as root"
	case errors.Is(err, fs.ErrNotExist):
		e.Hint = "create the file, or remove the link to it"
	}
	return e
}
