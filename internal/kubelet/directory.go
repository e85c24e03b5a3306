package kubelet

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// folder is the plugins_registry itself. The kubelet watches it by inode: once it has
// been removed and made again, a kubelet that was running never looks there again.
type folder struct {
	root string // the kubelet's root directory; empty: the folder is never made
	path string

	mu    sync.Mutex
	first fileID // as this process saw it first, or as a kubelet proved to watch it
	seen  bool
}

func newFolder(root, path string) *folder {
	f := &folder{root: root, path: path}
	f.anew()
	return f
}

// anew tells whether the folder is not the one that was seen first. One that is not
// there cannot be told yet.
func (f *folder) anew() bool {
	now, err := lookThrough(f.path)
	if err != nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.seen {
		f.first, f.seen = now.fileID, true
	}
	return now.fileID != f.first
}

// watched notes that a kubelet found a socket which was published in the folder as it is now.
func (f *folder) watched(id fileID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.first, f.seen = id, true
}

// ensure makes the folder if it is missing, as the kubelet would.
func (f *folder) ensure() (fileID, error) {
	now, err := lookThrough(f.path)
	if errors.Is(err, os.ErrNotExist) && f.root != "" {
		if err := f.make(); err != nil {
			return fileID{}, err
		}
		now, err = lookThrough(f.path)
	}
	switch {
	case err != nil:
		return fileID{}, fmt.Errorf("cannot use the kubelet's plugin registry: %w", err)
	case !now.isDir():
		return fileID{}, fmt.Errorf("cannot use the kubelet's plugin registry: %s is %s, not a directory: move it away", f.path, now.kind())
	}
	f.anew() // remember it, if it is the first
	return now.fileID, nil
}

func (f *folder) make() error {
	switch err := os.Mkdir(f.path, 0o750); {
	case err == nil:
		// The umask of the unit is stricter than the kubelet's.
		if err := os.Chmod(f.path, 0o750); err != nil {
			return fmt.Errorf("cannot make the kubelet's plugin registry: %w", err)
		}
		return nil
	case errors.Is(err, os.ErrExist):
		return nil // the kubelet was faster
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("the kubelet's root directory %s does not exist: set [kubelet] root_dir to the kubelet's --root-dir, or wait for it to be mounted or made", f.root)
	default:
		return fmt.Errorf("cannot make the kubelet's plugin registry: %w", err)
	}
}
