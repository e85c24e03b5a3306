package volumes

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Limits for reading. A node has a few hundred volumes, a vol_data.json a few hundred bytes.
const (
	maxNames = 50_000
	maxData  = 64 << 10
)

// reader reads the kubelet's directories.
type reader struct {
	mounts   map[string]bool // mount points
	kubelets map[string]bool // those of the kubelet
	left     int             // how many more names are read
	path     string          // of the directory that is read
	root     *os.Root        // the same
	volumes  []Volume
	err      error // the first one
}

// within calls read with path, which may be a mount point or a symbolic link, as the directory.
func (r *reader) within(path string, read func()) {
	resolved, err := filepath.EvalSymlinks(path) // as in mountinfo
	if err == nil {
		r.root, err = os.OpenRoot(resolved)
	}
	if err != nil {
		r.fail(path, err) // ignores a missing path: without a kubelet there are no volumes
		return
	}
	defer r.root.Close()
	r.path = resolved
	read()
}

// fail records the first error, except that a file does not exist.
func (r *reader) fail(path string, err error) {
	if err != nil && r.err == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		r.err = &fs.PathError{Op: "read", Path: path, Err: err}
	}
}

// open does not leave the directory, and crosses no mount points, because the file system behind
// them may never answer.
func (r *reader) open(name string, flags int) (f *os.File, err error) {
	for path := filepath.Join(r.path, name); path != r.path && err == nil; path = filepath.Dir(path) {
		if r.mounts[path] {
			err = fs.ErrNotExist // the kubelet mounts nothing on what is read
		}
	}
	if err == nil {
		f, err = r.root.OpenFile(name, flags|unix.O_NONBLOCK, 0)
	}
	r.fail(filepath.Join(r.path, name), err)
	return f, err
}

// names lists a directory. It does not call lstat for the names: they may be mount points.
func (r *reader) names(dir string) []string {
	f, err := r.open(dir, unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	defer f.Close()
	names, err := f.Readdirnames(r.left + 1)
	slices.Sort(names)
	if r.left -= len(names); r.left < 0 {
		r.left, err = 0, fmt.Errorf("there are more than %d names", maxNames)
	}
	if err != nil && err != io.EOF {
		r.fail(filepath.Join(r.path, dir), err)
	}
	return names
}

// changed returns when a directory got or lost a name; zero if it cannot be opened.
func (r *reader) changed(dir string) (t time.Time) {
	f, err := r.open(dir, unix.O_DIRECTORY)
	if err != nil {
		return t
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil {
		t = fi.ModTime()
	}
	return t
}

// read returns the content of a small regular file, and when it was written.
func (r *reader) read(name string) (text string, changed time.Time, err error) {
	f, err := r.open(name, 0)
	if err != nil {
		return "", changed, err
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return "", changed, err
	case !fi.Mode().IsRegular():
		return "", changed, errors.New("it is not a regular file")
	case fi.Size() > maxData:
		return "", changed, fmt.Errorf("it has more than %d bytes", maxData)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxData))
	return string(data), fi.ModTime(), err
}
