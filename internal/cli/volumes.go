package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"

	"csi-registrar/internal/control"
	"csi-registrar/internal/rootdir"
	"csi-registrar/internal/status"
	"csi-registrar/internal/volumes"
	"csi-registrar/internal/worker"
)

// addVolumes adds the volumes in use to a document. The command looks for them, not the daemon, so
// that only the command waits for the kubelet's files, and the daemon has nothing to poll or to
// keep in memory. Otherwise the document stays as the daemon wrote it.
func addVolumes(ctx context.Context, doc control.Document, s status.Document) (control.Document, status.Document) {
	var whole struct{ Drivers []json.RawMessage }
	if err := json.Unmarshal(doc, &whole); err != nil || len(whole.Drivers) != len(s.Drivers) || filepath.Base(s.PluginsRegistry) != rootdir.PluginsRegistryName {
		return doc, s // plugins_registry comes from a flag: root_dir is unknown
	}
	counts, err := volumes.Count(ctx, worker.NewPool(), filepath.Dir(s.PluginsRegistry))
	if err != nil {
		s.VolumesError = err.Error()
		return doc, s
	}
	for i, raw := range whole.Drivers {
		n := counts[s.Drivers[i].Name]
		s.Drivers[i].Volumes = &n
		added := fmt.Appendf(nil, `,"volumes":{"staged":%d,"published":%d}}`, n.Staged, n.Published)
		doc = bytes.Replace(doc, raw, slices.Concat(raw[:len(raw)-1], added), 1)
	}
	return doc, s
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
