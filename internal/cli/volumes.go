package cli

import (
	"context"
	"fmt"
	"path/filepath"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/worker"
)

// addVolumes adds the volumes in use to a document. The command counts them, not the daemon, so
// that only the command waits for the kubelet's files.
func addVolumes(ctx context.Context, s *status.Document) {
	if filepath.Base(s.PluginsRegistry) != rootdir.PluginsRegistryName {
		return // plugins_registry comes from a flag: root_dir is unknown
	}
	counts, err := volumes.Count(ctx, worker.NewPool(), filepath.Dir(s.PluginsRegistry))
	if err != nil {
		s.VolumesError = err.Error()
		return
	}
	for i := range s.Drivers {
		n := counts[s.Drivers[i].Name]
		s.Drivers[i].Volumes = &n
	}
}

// volumesText formats the number of a driver's volumes; empty if there are none, or it is not
// known.
func volumesText(d status.Driver) string {
	switch v := d.Volumes; {
	case v == nil || *v == (status.Volumes{}):
		return ""
	case v.Staged == 0:
		return fmt.Sprint(v.Published)
	default:
		return fmt.Sprintf("%d, %d staged", v.Published, v.Staged)
	}
}
