package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/worker"
)

// Sweep removes what a crash or a power cut left behind, and returns the removed paths: stale
// sockets with the configured drivers' names, our own stale temporary names, recorders' sockets,
// and endpoint links without a record. It removes nothing else, and no socket that somebody listens
// on. Call it before the kubelet starts, which would dial the first and then back off for up to two
// minutes. It takes 100 ms if something was left just now, otherwise no time.
func (r *Registry) Sweep(ctx context.Context, names []string) ([]string, error) {
	var removed []string // not the result: an abandoned call may still write it
	err, late := worker.Do(ctx, r.o.Pool.Slot(r.dir.path, nil), checkTime, func() error {
		var paths []string
		for _, name := range names {
			if path, err := pluginreg.SocketPath(r.dir.path, name); err == nil {
				paths = append(paths, path)
			}
		}
		var errs []error
		for _, dir := range []string{r.dir.path, rootdir.EndpointLinks(r.dir.root)} {
			entries, err := r.o.Host.ReadDir(dir)
			errs = append(errs, ignoreMissing(err))
			for _, e := range entries {
				switch path := filepath.Join(dir, e.Name()); {
				case isTemporary(e.Name()), strings.HasPrefix(e.Name(), recorderPrefix):
					paths = append(paths, path)
				case e.Type() == fs.ModeSymlink && (strings.HasPrefix(e.Name(), linkPrefix) || r.isOrphan(path)):
					errs = append(errs, ignoreMissing(r.o.Host.Remove(path)))
				}
			}
		}
		var err error
		removed, err = r.o.Host.RemoveStale(ctx, paths)
		return errors.Join(append(errs, err)...)
	}, nil)
	if late != nil {
		return nil, late
	}
	return removed, err
}

// SweepRecords removes the stale sockets, and the links and records, of drivers that are not among
// enabled, the names of all that are. A socket with a record but without a listener in the
// descriptor store, which was full, is removed by nobody else. It returns the removed paths.
func (r *Registry) SweepRecords(ctx context.Context, enabled []string) ([]string, error) {
	if r.o.RunDir == "" {
		return nil, nil
	}
	host := r.o.Host
	var removed []string // as in Sweep
	err, late := worker.Do(ctx, r.o.Pool.Slot(r.dir.path, nil), checkTime, func() error {
		left, err := host.readRecords(r.o.RunDir)
		errs := []error{err}
		for file, rec := range left {
			driver := strings.TrimSuffix(filepath.Base(file), recordSuffix)
			if filepath.Dir(rec.Path) != r.dir.path || slices.Contains(enabled, driver) {
				continue
			}
			// If this call was abandoned, the driver may be enabled by now: the link and the
			// record are those of its Socket.
			enabledNow := func() bool { return r.driverSocket(driver) != nil }
			at, err := host.Lstat(rec.Path)
			if err == nil && at.FileID == rec.FileID {
				stale, err := host.RemoveStale(ctx, []string{rec.Path})
				if removed = append(removed, stale...); len(stale) == 0 { // somebody listens
					errs = append(errs, err)
					continue
				}
			}
			if err == nil || isMissing(err) {
				err = nil
				if !enabledNow() {
					err = rec.removeLink(host, driver)
				}
				if err == nil && !enabledNow() {
					err = ignoreMissing(host.Remove(file))
				}
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}, nil)
	if late != nil {
		return nil, late
	}
	return removed, err
}

// isOrphan reports whether path is the endpoint link of a driver that has no record: it belongs to
// no registration that an earlier process left.
func (r *Registry) isOrphan(path string) bool {
	driver := strings.TrimSuffix(filepath.Base(path), ".sock")
	if r.o.RunDir == "" || path != rootdir.EndpointLink(r.dir.root, driver) {
		return false
	}
	_, err := r.o.Host.Lstat(r.recordOf(driver))
	return errors.Is(err, os.ErrNotExist)
}
