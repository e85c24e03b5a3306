package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// addVolumes adds the volumes in use to a document. The command counts them, not the daemon, so
// that only the command waits for the kubelet's files.
func addVolumes(ctx context.Context, root string, s *status.Document) {
	res, err := loadConfig(ctx, config.Source{Root: root})
	var counts map[string]status.Volumes
	if err == nil {
		kubelet := res.Config.Kubelet
		if s.PluginsRegistry.Checked(func(dir string) bool { return dir == kubelet.PluginsRegistry() }) == "" {
			return // it comes from a flag, or the daemon has not read the files
		}
		counts, err = volumes.Count(ctx, worker.NewPool(), kubelet.RootDir, s.Kubelet.PID)
	}
	if err != nil {
		s.VolumesError = err.Error()
		return
	}
	for i := range s.Drivers {
		n := counts[s.Drivers[i].Name]
		s.Drivers[i].Volumes = &n
		delete(counts, s.Drivers[i].Name)
	}
	if err := volumes.DropRegistered(ctx, worker.NewPool(), res.Config.Kubelet.PluginsRegistry(), counts); err != nil {
		s.VolumesError = err.Error()
		return
	}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		s.Unregistered = append(s.Unregistered, fmt.Sprintf("%s of %s", count(counts[name].InUse(), "volume"), safetext.Word(name)))
	}
}

// volumesText formats the number of a driver's volumes; empty if there are none, or it is not
// known.
func volumesText(d status.Driver) string {
	if d.Volumes == nil || *d.Volumes == (status.Volumes{}) {
		return ""
	}
	text := fmt.Sprint(d.Volumes.Published)
	if n := d.Volumes.Waiting; n > 0 {
		text += fmt.Sprintf(", %d waiting", n)
	}
	if n := d.Volumes.Staged; n > 0 {
		text += fmt.Sprintf(", %d staged", n)
	}
	return text
}
