// Package volumes finds out which volumes of CSI drivers are in use on this node, from the
// files that the kubelet keeps of them and the list of mounts (kubelet v1.36, pkg/volume/csi):
//
//	pods/POD/volumes/kubernetes.io~csi/NAME/{vol_data.json,mount}        published to a pod
//	plugins/kubernetes.io/csi/DRIVER/HASH/{vol_data.json,globalmount}    staged
//	plugins/kubernetes.io/csi/volumeDevices/NAME/data/vol_data.json      a block volume,
//	plugins/kubernetes.io/csi/volumeDevices/staging/NAME                 staged
//	plugins/kubernetes.io/csi/volumeDevices/publish/NAME/POD             and published
//
// The kubelet writes vol_data.json before it calls the driver and removes it after the
// driver has undone the call. So a file that is there stands for a call that is still owed.
package volumes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"csi-registrar/internal/status"
	"csi-registrar/internal/worker"
)

// Problem says what is wrong with a volume.
type Problem string

// The problems that the files and mounts show. Whether a published volume's pod is still
// wanted is known to the API server only.
const (
	Broken    Problem = "broken"    // vol_data.json is not what the kubelet can read
	NoData    Problem = "no data"   // mounted, and there is no vol_data.json
	Unmounted Problem = "unmounted" // published, and nothing is mounted there
	Unused    Problem = "unused"    // staged, and published to no pod
)

// Volume is a volume that is staged, or published to one pod. Its strings are strangers'.
type Volume struct {
	Driver string // empty where vol_data.json cannot be read
	Pod    string // the pod's UID; empty: staged, for all pods
	Dir    string // that holds vol_data.json
	Target string // where the driver was asked to stage or publish it
	Block  bool   // a device, not a file system

	Mounted bool      // something is mounted at Target
	Changed time.Time // when vol_data.json was written; zero if it cannot be read
	Problem Problem   // empty: none
	Detail  string    // of Broken

	handle string // which volume of the driver it is
}

// Settling is how long Unmounted and Unused may be what the kubelet is about to change: a
// call of a driver may take 2 minutes, the next one comes up to 2 minutes later.
const Settling = 5 * time.Minute

// Counts counts the volumes of each driver, also those with a problem: the kubelet will ask
// the driver to unpublish and unstage them.
func Counts(all []Volume) map[string]status.Volumes {
	counts := map[string]status.Volumes{}
	for _, v := range all {
		c := counts[v.Driver]
		if v.Pod == "" {
			c.Staged++
		} else {
			c.Published++
		}
		counts[v.Driver] = c
	}
	delete(counts, "")
	return counts
}

// countLimit is how long Count waits for the kubelet's files.
const countLimit = 2 * time.Second

// Count is Counts of Read with this machine's mounts. The error is a *worker.NotAnswering if
// the file system does not answer.
func Count(ctx context.Context, pool *worker.Pool, rootDir string) (map[string]status.Volumes, error) {
	var found []Volume
	err, late := worker.Do(ctx, pool.Slot(rootDir, nil), countLimit, func() (err error) {
		found, err = Read(rootDir, "/proc")
		return err
	}, nil)
	if late != nil {
		return nil, late // found belongs to the abandoned call
	}
	return Counts(found), err
}

// Read looks at the files of the kubelet with this root directory, and at self/mountinfo in
// proc. What is below a mount point is never touched; it can still block, for as long as the
// file system of the root directory does not answer. With an error it returns what could be
// read, without Unmounted and Unused.
func Read(rootDir, proc string) ([]Volume, error) {
	r := &reader{left: maxNames}
	err := r.mountPoints(filepath.Join(proc, "self/mountinfo"))
	if err == nil {
		r.within(filepath.Join(rootDir, "pods"), r.pods)
		r.within(filepath.Join(rootDir, "plugins/kubernetes.io/csi"), r.staged)
		err = r.err
	}
	if err != nil {
		return r.volumes, fmt.Errorf("cannot look at the volumes: %w", err)
	}
	r.compare()
	return r.volumes, nil
}

// pods reads the volumes that are published as file systems.
func (r *reader) pods() {
	for _, pod := range r.names(".") {
		volumes := pod + "/volumes/kubernetes.io~csi/"
		for _, name := range r.names(volumes) {
			r.add(Volume{Pod: pod, Dir: volumes + name, Target: volumes + name + "/mount"})
		}
	}
}

// staged reads the staged volumes, and block volumes.
func (r *reader) staged() {
	for _, driver := range r.names(".") { // "pv" for what a kubelet before v1.24 staged
		if driver == "volumeDevices" {
			continue
		}
		for _, hash := range r.names(driver) {
			dir := driver + "/" + hash
			r.add(Volume{Dir: dir, Target: dir + "/globalmount"})
		}
	}
	data := func(name string) string { return "volumeDevices/" + name + "/data" }
	for _, name := range r.names("volumeDevices/staging") {
		r.add(Volume{Dir: data(name), Target: "volumeDevices/staging/" + name, Block: true})
	}
	for _, name := range r.names("volumeDevices/publish") {
		for _, pod := range r.names("volumeDevices/publish/" + name) {
			r.add(Volume{Pod: pod, Dir: data(name), Target: "volumeDevices/publish/" + name + "/" + pod, Block: true})
		}
	}
}

// add adds a volume, whose paths are relative, if there is any: its directory is made before
// vol_data.json is written.
func (r *reader) add(v Volume) {
	text, changed, err := r.read(v.Dir + "/vol_data.json")
	v.Dir, v.Target = filepath.Join(r.path, v.Dir), filepath.Join(r.path, v.Target)
	v.Mounted = r.mounts[v.Target]
	var data map[string]string // as the kubelet decodes it
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if !v.Mounted {
			return
		}
		v.Problem = NoData
	case err != nil:
		v.Problem, v.Detail = Broken, err.Error()
	case json.NewDecoder(strings.NewReader(text)).Decode(&data) != nil || data["driverName"] == "" || data["volumeHandle"] == "":
		v.Problem, v.Detail = Broken, fmt.Sprintf("no driverName and volumeHandle can be read from its %d bytes", len(text))
	}
	v.Changed, v.Driver, v.handle = changed, data["driverName"], data["volumeHandle"]
	r.volumes = append(r.volumes, v)
}

// compare finds what one volume alone does not show.
func (r *reader) compare() {
	published := map[[2]string]bool{}
	for _, v := range r.volumes {
		if v.Pod != "" {
			published[[2]string{v.Driver, v.handle}] = true
		}
	}
	for i := range r.volumes {
		v := &r.volumes[i]
		switch {
		case v.Problem != "":
		case v.Pod == "" && !published[[2]string{v.Driver, v.handle}]:
			v.Problem = Unused
		case v.Pod != "" && !v.Block && !v.Mounted:
			v.Problem = Unmounted
		}
	}
	sort.Slice(r.volumes, func(i, j int) bool {
		a, b := &r.volumes[i], &r.volumes[j]
		return cmp.Or(strings.Compare(a.Dir, b.Dir), strings.Compare(a.Target, b.Target)) < 0
	})
}
