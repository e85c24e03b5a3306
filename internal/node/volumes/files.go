package volumes

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	top      int             // its descriptor
	volumes  []Volume
	err      error // the first one
}

// within calls read with path, which may be a mount point or a symbolic link, as the directory.
func (r *reader) within(path string, read func()) {
	resolved, err := filepath.EvalSymlinks(path) // as in mountinfo
	if err == nil {
		r.top, err = unix.Open(resolved, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		r.fail(path, err) // ignores a missing path: without a kubelet there are no volumes
		return
	}
	defer unix.Close(r.top)
	r.path = resolved
	read()
}

// fail records the first error, except that a file does not exist.
func (r *reader) fail(path string, err error) {
	if r.err == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		r.err = &fs.PathError{Op: "read", Path: path, Err: err}
	}
}

// open follows no symbolic links and crosses no mount points, because the file system behind them
// may never answer. openat2(2) would do both at once, but fails with RestrictSUIDSGID= in the unit.
func (r *reader) open(name string, flags int) (*os.File, error) {
	fd, err := r.walk(name, flags|unix.O_RDONLY|unix.O_NONBLOCK)
	if err == unix.ELOOP {
		err = unix.ENOENT // the kubelet creates no links
	}
	if err != nil {
		r.fail(filepath.Join(r.path, name), err)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (r *reader) walk(name string, flags int) (fd int, err error) {
	parent, path := r.top, r.path
	parts := strings.Split(filepath.Clean(name), "/")
	for i, part := range parts {
		how := unix.O_PATH | unix.O_DIRECTORY
		if i == len(parts)-1 {
			how = flags
		}
		path = filepath.Join(path, part)
		if part != "." && r.mounts[path] {
			fd, err = -1, unix.ENOENT // the kubelet mounts nothing on the directories that are read
		} else {
			fd, err = unix.Openat(parent, part, how|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		}
		if parent != r.top {
			unix.Close(parent)
		}
		if err != nil {
			return -1, err
		}
		parent = fd
	}
	return fd, nil
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
