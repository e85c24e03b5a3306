package doctor

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/volumes"
)

// readVolumes finds the volumes that are in use.
func (x *diagnosis) readVolumes(ctx context.Context) {
	root := x.config.Config.Kubelet.RootDir
	x.volumes, x.volumesErr = look(ctx, x, root, func() ([]volumes.Volume, error) { return volumes.Read(root, x.proc()) })
}

// volumeProblems reports volumes that the kubelet cannot unmount, or has lost track of, and what
// the kubelet does about them by itself (kubelet v1.36: pkg/volume/csi,
// pkg/kubelet/volumemanager/reconciler). Doctor does not ask the API server whether a pod still
// exists.
func (x *diagnosis) volumeProblems(ctx context.Context) {
	if x.volumesErr != nil {
		x.checked("", StepVolumes, Skipped, "the volumes cannot be read: %v", x.volumesErr)
		return
	}
	published := 0
	var seen map[string]bool
	if slices.ContainsFunc(x.volumes, func(v volumes.Volume) bool { return v.Problem == volumes.Unmounted }) {
		seen = x.kubeletMounts(ctx)
	}
	wrong := map[volumes.Problem][]volumes.Volume{}
	for _, v := range x.volumes {
		if v.Pod != "" {
			published++
		}
		changing := (v.Problem == volumes.Unmounted || v.Problem == volumes.Unused) && time.Since(v.Changed) < volumes.Settling
		hidden := v.Problem == volumes.Unmounted && seen[v.Target]
		if v.Problem != "" && !changing && !hidden && (v.Driver == "" || x.selected(v.Driver)) {
			wrong[v.Problem] = append(wrong[v.Problem], v)
		}
	}
	if len(wrong) == 0 {
		x.checked("", StepVolumes, OK, "%d published to pods, %d staged", published, len(x.volumes)-published)
	}
	restart := []Fix{note("if its pod is to stay: restart the kubelet, which then calls the driver again and writes the file"), x.kubelet.restart(),
		note("if its pod is gone: write the file again, with driverName, volumeHandle and specVolID from driver, volumeHandle and the name"),
		note("of its PersistentVolume: the kubelet then continues within about two minutes, or at its next start")}
	if list := wrong[volumes.Broken]; list != nil {
		x.problem("", StepVolumes, VolumeDataBroken, "the kubelet cannot read vol_data.json of "+volumeList(list)+
			": it retries the unmount forever, and the pod stays Terminating; after a restart it tries once",
			"a JSON object with driverName and volumeHandle, which the kubelet writes before it calls the driver", restart...)
	}
	if list := wrong[volumes.NoData]; list != nil {
		x.problem("", StepVolumes, VolumeDataMissing, "mounted without vol_data.json: "+volumeList(list)+
			": the kubelet never unmounts it, and never removes the directory of its pod", "vol_data.json, or no mount", restart...)
	}
	if list := wrong[volumes.Unmounted]; list != nil {
		x.warning("", StepVolumes, VolumeNotMounted, "published, and nothing is mounted there: "+volumeList(list)+
			": the kubelet does not check again while it runs", "a mount, unless this driver publishes without one",
			note("the kubelet, restarted, publishes again what a pod still uses, and unpublishes the rest"), x.kubelet.restart())
	}
	if list := wrong[volumes.Unused]; list != nil {
		x.warning("", StepVolumes, VolumeStillStaged, "staged, and published to no pod of this node: "+volumeList(list)+
			": the kubelet unstages it, and retries if the driver fails; a kubelet that was restarted in between has forgotten it",
			"it is unstaged after the last pod", logOf(x.kubelet.service()),
			note("if the kubelet has forgotten it: run a pod with this volume on this node and delete it, and the kubelet unstages it"))
	}
}

// kubeletMounts returns the mount points in the kubelet's mount namespace, or none if they cannot
// be read: then doctor reports what it finds in its own. With OpenShift's kubens.service the
// kubelet and the pods have a namespace of their own, and what a driver in a pod mounts does not
// reach the node's.
func (x *diagnosis) kubeletMounts(ctx context.Context) map[string]bool {
	if x.kubelet == nil {
		return nil
	}
	all, _ := look(ctx, x, x.proc(), func() ([]volumes.Mount, error) {
		return volumes.Mounts(x.proc(), strconv.Itoa(x.kubelet.pid))
	})
	points := map[string]bool{}
	for _, m := range all {
		points[m.Point] = true
	}
	return points
}

// stuckVolumes returns how many volumes the kubelet cannot unmount while no driver is registered,
// as the rest of a sentence; empty if there are none.
func (x *diagnosis) stuckVolumes() string {
	n := 0
	for _, d := range x.config.Config.Drivers {
		if d.Enabled {
			n += x.volumesOf(d.Name)
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("; %s in use, which the kubelet cannot unmount while the driver is not registered", count(n, "volume"))
}

// volumesOf returns the number of a driver's volumes that are in use, as far as they can be read.
func (x *diagnosis) volumesOf(driver string) int {
	handles := map[string]bool{} // one that is staged and published is one volume
	for _, v := range x.volumes {
		if v.Driver == driver {
			handles[v.Handle] = true
		}
	}
	return len(handles)
}

// volumeList formats the directories of some volumes, and their drivers.
func volumeList(all []volumes.Volume) string {
	var names []string
	for _, v := range all[:min(len(all), 3)] {
		name, about := safetext.Word(v.Dir), v.Detail
		if v.Driver != "" {
			about = strings.TrimSuffix(safetext.Word(v.Driver)+", "+about, ", ")
		}
		if about != "" {
			name += " (" + about + ")"
		}
		names = append(names, name)
	}
	if more := len(all) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}
