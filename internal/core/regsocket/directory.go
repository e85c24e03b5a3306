package regsocket

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
)

// directory is the plugins_registry. The kubelet watches it by inode: if it is removed and
// recreated, a running kubelet never looks there again. Its methods block for as long as the file
// system does not answer.
type directory struct {
	host *Host
	root string // the kubelet's root directory; empty: path is never created
	path string

	mu sync.Mutex
	// As this process saw it first, or as a kubelet proved to watch it; zero: neither.
	first unixsock.FileID
}

// note records the directory if it is the first one that is seen, and reports whether another one
// is there now.
func (d *directory) note() (recreated bool) {
	now, err := d.host.Stat(d.path)
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

// watched notes that a kubelet found a socket which was published in this directory (zero: not
// known).
func (d *directory) watched(id unixsock.FileID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if id != (unixsock.FileID{}) {
		d.first = id
	}
}

// ensure creates the directory if it is missing, as the kubelet would.
func (d *directory) ensure() (unixsock.FileID, error) {
	now, err := d.host.Stat(d.path)
	if errors.Is(err, os.ErrNotExist) && d.root != "" {
		if err = d.host.Mkdir(d.path); errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("the kubelet's root directory %s does not exist: set [kubelet] root_dir to the kubelet's --root-dir, or wait for it to be mounted or made", d.root)
		}
		if err == nil {
			now, err = d.host.Stat(d.path)
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

// makeDirectory creates a directory with the kubelet's mode, unless the kubelet was faster.
func makeDirectory(path string) error {
	if err := os.Mkdir(path, 0o750); errors.Is(err, os.ErrExist) {
		return nil
	} else if err != nil {
		return err
	}
	f, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	err = f.Chmod(0o750) // the unit's umask is stricter than the kubelet's
	if errors.Is(err, unix.EPERM) {
		err = nil // its filter forbids it; 0700 does for the kubelet, too
	}
	return errors.Join(err, f.Close())
}
