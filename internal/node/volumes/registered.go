package volumes

import (
	"context"
	"path/filepath"
	"time"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/worker"
)

// DropRegistered removes the drivers from counts that have a registration socket in registry,
// whoever serves it.
func DropRegistered(ctx context.Context, pool *worker.Pool, registry string, counts map[string]status.Volumes) error {
	if len(counts) == 0 {
		return nil
	}
	sockets, err := worker.Do(ctx, pool.Slot(registry, nil), time.Second, func() []string { return pluginreg.Sockets(registry) }, nil)
	for _, path := range sockets {
		if name, ok := rootdir.DriverName(filepath.Base(path)); ok {
			delete(counts, name)
			continue
		}
		name, late := worker.Do(ctx, pool.Slot(path, nil), time.Second, func() string {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			info, _, _ := pluginreg.GetInfo(ctx, path) // without an answer it serves no driver
			return info.Name
		}, nil)
		if late == nil {
			delete(counts, name)
		}
	}
	return err
}
