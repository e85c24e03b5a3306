package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

// Sweep removes what a crash or a power cut left behind: stale sockets under the
// configured drivers' names, and our own temporary names that are stale. Nothing else is
// touched, and nothing that somebody listens on. It returns the removed paths. To be
// called before the kubelet starts, which would dial them and then wait for up to two minutes;
// it takes 100 ms if something was left a moment ago, and no time else.
func (r *Registry) Sweep(ctx context.Context, names []string) ([]string, error) {
	var removed []string // not the result: what was abandoned may still write it
	err, late := worker.Do(ctx, r.o.Pool.Slot(r.dir.path, nil), checkTime, func() error {
		var paths []string
		for _, name := range names {
			if path, err := pluginreg.SocketPath(r.dir.path, name); err == nil {
				paths = append(paths, path)
			}
		}
		var errs []error
		for _, dir := range []string{r.dir.root, r.dir.path, linksIn(r.dir.root)} { // there need not be a root
			entries, err := os.ReadDir(dir)
			errs = append(errs, ignoreMissing(err))
			for _, e := range entries {
				switch path := filepath.Join(dir, e.Name()); {
				case isTemporary(e.Name()), strings.HasPrefix(e.Name(), recorderPrefix):
					paths = append(paths, path)
				case strings.HasPrefix(e.Name(), linkPrefix) && e.Type() == fs.ModeSymlink:
					errs = append(errs, ignoreMissing(os.Remove(path)))
				}
			}
		}
		var err error
		removed, err = unixsock.RemoveStale(ctx, paths)
		return errors.Join(append(errs, err)...)
	}, nil)
	if late != nil {
		return nil, late
	}
	return removed, err
}
