package kubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

// Sweep removes what a crash or a power cut left behind: stale sockets under the
// configured drivers' names, and our own temporary names that are stale. Nothing else is
// touched, and nothing that somebody listens on. It returns the removed paths. To be
// called before the kubelet starts, which would dial them and then wait for up to two minutes;
// it takes 100 ms if there is something, and no time else.
func (r *Registry) Sweep(ctx context.Context, names []string) (removed []string, err error) {
	found, late := worker.Do(ctx, r.pool.Slot(r.dir.path, nil), checkTime, func() (found swept) {
		found.removed, found.err = r.sweep(ctx, names)
		return found
	}, nil)
	return found.removed, errors.Join(late, found.err)
}

type swept struct {
	removed []string
	err     error
}

func (r *Registry) sweep(ctx context.Context, names []string) (removed []string, err error) {
	var paths []string
	for _, name := range names {
		if path, err := pluginreg.SocketPath(r.dir.path, name); err == nil {
			paths = append(paths, path)
		}
	}
	var errs []error
	for _, dir := range slices.Compact([]string{r.dir.root, r.dir.path}) {
		if dir == "" {
			continue
		}
		entries, err := os.ReadDir(dir)
		if err := ignoreMissing(err); err != nil {
			errs = append(errs, err)
		}
		for _, e := range entries {
			if isTemporary(e.Name()) {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	removed, err = unixsock.RemoveStale(ctx, paths)
	return removed, errors.Join(append(errs, err)...)
}
