package kubelet

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/unixsock"
)

// directory is the plugins_registry itself. The kubelet watches it by inode: once it has
// been removed and made again, a kubelet that was running never looks there again. Its methods
// block for as long as the file system does not answer.
type directory struct {
	root string // the kubelet's root directory; empty: it is never made
	path string

	mu    sync.Mutex
	first unixsock.FileID // as this process saw it first, or as a kubelet proved to watch it; zero: neither
}

// note remembers the directory if it is the first that is seen, and reports whether another
// one is there now.
func (d *directory) note() (recreated bool) {
	now, err := unixsock.Stat(d.path)
	if err != nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.first == (unixsock.FileID{}) {
		d.first = now.FileID
	}
	return now.FileID != d.first
}

// watched notes that a kubelet found a socket which was published in this directory (zero: not known).
func (d *directory) watched(id unixsock.FileID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if id != (unixsock.FileID{}) {
		d.first = id
	}
}

// ensure makes the directory if it is missing, as the kubelet would.
func (d *directory) ensure() (unixsock.FileID, error) {
	now, err := unixsock.Stat(d.path)
	if errors.Is(err, os.ErrNotExist) && d.root != "" {
		if err = d.make(); err == nil {
			now, err = unixsock.Stat(d.path)
		}
	}
	switch {
	case err != nil:
		return unixsock.FileID{}, fmt.Errorf("cannot use the plugins_registry: %w", err)
	case !now.IsDir():
		return unixsock.FileID{}, fmt.Errorf("cannot use the plugins_registry: %s is %s, not a directory: move it away", d.path, now.Kind())
	}
	d.note()
	return now.FileID, nil
}

func (d *directory) make() error {
	switch err := os.Mkdir(d.path, 0o750); {
	case errors.Is(err, os.ErrExist):
		return nil // the kubelet was faster
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("the kubelet's root directory %s does not exist: set [kubelet] root_dir to the kubelet's --root-dir, or wait for it to be mounted or made", d.root)
	case err != nil:
		return err
	}
	f, err := os.OpenFile(d.path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o750), f.Close()) // the umask of the unit is stricter than the kubelet's
}

// place is where a socket is bound before it is moved into the directory: outside of it, for the
// kubelet logs an error for each name that comes and goes in it. Where that is another mount, or
// may not be written, a dot name within has to do: the kubelet ignores those. A new socket that
// could not be moved in is not even made, for the old one is removed before the move.
func (d *directory) place() string {
	root, _ := unixsock.Stat(d.root) // of no mount after an error
	dir, _ := unixsock.Stat(d.path)
	if root.SameMount(dir) && unix.Access(d.root, unix.W_OK) == nil {
		return d.root
	}
	return d.path
}
