package regsocket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// directory is the plugins_registry. The kubelet watches it by inode: if it is removed and
// recreated, a running kubelet never looks there again. Its methods block for as long as the file
// system does not answer.
type directory struct {
	host *Host
	root string // the kubelet's root directory; empty: path is never created
	path string

	mu      sync.Mutex
	watched unixsock.FileID // as it was seen first, or when a kubelet last called; zero: not yet
	seen    unixsock.FileID // as it was seen last
}

// note looks at the directory, and reports whether it is another one than the kubelet watches. If
// it cannot be examined, the last answer holds.
func (d *directory) note() (recreated bool) {
	now, err := d.host.Stat(d.path)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.seen = now.FileID
	}
	if d.watched == (unixsock.FileID{}) {
		d.watched = d.seen
	}
	return d.seen != d.watched
}

// called notes that a kubelet found a socket in the directory.
func (d *directory) called() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watched = d.seen
}

// ensure creates the directory if it is missing, as the kubelet would.
func (d *directory) ensure() error {
	now, err := d.host.Stat(d.path)
	if errors.Is(err, os.ErrNotExist) && d.root != "" {
		err = d.host.Mkdir(d.path, 0o750) // the kubelet's mode
		switch {
		case errors.Is(err, os.ErrNotExist):
			err = fmt.Errorf("the kubelet's root directory %s does not exist: set [kubelet] root_dir to the kubelet's --root-dir, or wait for it to be mounted or made", d.root)
		case err == nil, errors.Is(err, os.ErrExist): // the kubelet was faster
			now, err = d.host.Stat(d.path)
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("cannot use the plugins_registry: %w", err)
	case !now.IsDir():
		return fmt.Errorf("cannot use the plugins_registry: %s is %s, not a directory: move it away", d.path, now.Kind())
	}
	d.note()
	return nil
}

// leftoversTogether is how many leftovers are removed at a time: there can be thousands.
const leftoversTogether = 32

// RemoveLeftovers removes leftovers of earlier processes, of drivers that are not among enabled, or
// are not published: their sockets, also below an earlier root_dir, their records, and the
// listeners in the store. Drivers without a record are removed if they are among named. Leftovers
// that cannot be removed yet are left for the next call. Call it after each change of the enabled
// drivers, when their Sockets are open.
func (r *Registry) RemoveLeftovers(ctx context.Context, enabled, named []string) error {
	if r.o.RunDir == "" {
		return nil
	}
	left, err := r.o.Host.readRecords(r.o.RunDir)
	unread := isShortage(err) // the next call reads them; the store forgets its listeners now
	var errs []error
	if unread {
		errs = append(errs, err)
	} else if err != nil {
		r.o.Log.Warn("a record of a registration cannot be used", "error", err)
	}
	names := slices.Clone(named)
	for file := range left {
		names = append(names, strings.TrimSuffix(filepath.Base(file), recordSuffix))
	}
	slices.Sort(names)
	for names := range slices.Chunk(slices.Compact(names), leftoversTogether) {
		results := make([]error, len(names))
		var removals sync.WaitGroup
		for i, name := range names {
			removals.Go(func() {
				rec, known := left[r.recordOf(name)]
				results[i] = r.removeLeftover(ctx, name, rec, unread && !known, slices.Contains(enabled, name))
			})
		}
		removals.Wait()
		errs = append(errs, results...)
	}
	return errors.Join(errs...)
}

// removeLeftover removes a driver's socket that nobody serves, its listener and its record, of
// which rec is the content. An enabled driver without a Socket may still adopt them. A record that
// was not read stays, with the socket: it alone names an earlier root_dir.
func (r *Registry) removeLeftover(ctx context.Context, driver string, rec record, unread, enabled bool) error {
	path, err := rootdir.SocketPath(r.dir.path, driver)
	if err != nil {
		return r.o.Store.Forget(ctx, StorePrefix+driver)
	}
	inUse := func() bool {
		s := r.socketAt(path)
		return s == nil && enabled || s != nil && (s.current.Load() != nil || s.toAdopt.Load() != nil)
	}
	if inUse() {
		return nil
	}
	// The slot is that of the driver's Socket.
	return worker.Run(ctx, r.o.Pool.Slot(path, nil), changeTime, func() error {
		if inUse() {
			return nil
		}
		forgetErr := r.o.Store.Forget(ctx, StorePrefix+driver)
		if unread {
			return forgetErr
		}
		removed, err := r.o.Host.removeLeftover(ctx, r.recordOf(driver), path, rec)
		if removed != "" {
			r.o.Log.Info("registration socket that nobody serves removed", "path", removed)
		}
		return errors.Join(err, forgetErr)
	})
}

// removeLeftover removes the file of a record, or else a socket at path that no process serves, and
// then the record. It returns the path of the removed socket; empty: there was none. A record
// without a file is that of a process that was killed while it published.
func (h *Host) removeLeftover(ctx context.Context, file, path string, rec record) (removed string, err error) {
	did := false
	if rec.Ino != 0 {
		did, err = h.RemoveFile(rec.Path, rec.FileID)
	}
	if did || rec.Ino == 0 {
		path = cmp.Or(rec.Path, path)
	}
	if !did && err == nil {
		at, _ := h.Lstat(path) // an error is that of Vacate, too
		did, err = h.Vacate(ctx, path)
		if held, ok := errors.AsType[*unixsock.InUse](err); ok {
			err = nil
			// the descriptor store may still have the listener
			if rec.Ino == 0 && held.PID > 0 && errors.Is(unix.Kill(held.PID, 0), unix.ESRCH) {
				did, err = h.RemoveFile(path, at.FileID)
			}
		}
	}
	if err == nil {
		err = ignoreMissing(h.Remove(file))
	}
	if did {
		removed = path
	}
	return removed, err
}
