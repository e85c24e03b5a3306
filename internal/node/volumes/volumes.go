// Package volumes finds the volumes of CSI drivers that are in use on this node, from the files
// that the kubelet keeps about them and the list of mounts (kubelet v1.36, pkg/volume/csi):
//
//	pods/POD/volumes/kubernetes.io~csi/NAME/{vol_data.json,mount}        published to a pod
//	plugins/kubernetes.io/csi/DRIVER/HASH/{vol_data.json,globalmount}    staged
//	plugins/kubernetes.io/csi/volumeDevices/NAME/data/vol_data.json      a block volume,
//	plugins/kubernetes.io/csi/volumeDevices/staging/NAME                 staged
//	plugins/kubernetes.io/csi/volumeDevices/publish/NAME/POD             and published
//
// The kubelet writes vol_data.json before it calls the driver to stage or publish, and removes it
// after the driver has undone that. So an existing file means that a call is still due.
package volumes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/worker"
)

// Problem is the kind of problem of a volume.
type Problem string

// The problems that the files and mounts show. Only the API server knows whether the pod of a
// published volume still exists.
const (
	Broken    Problem = "broken"    // the kubelet cannot read vol_data.json
	NoData    Problem = "no data"   // mounted, and there is no vol_data.json
	Unmounted Problem = "unmounted" // published, and nothing is mounted there
	Unused    Problem = "unused"    // staged, and published to no pod
)

// Volume is a volume that is staged, or published to one pod. Its strings are untrusted.
type Volume struct {
	Driver string // empty where vol_data.json cannot be read
	Pod    string // the pod's UID; empty: staged, for all pods
	Dir    string // the directory of vol_data.json
	Target string // the path at which the driver stages or publishes it
	Block  bool   // a device, not a file system

	Mounted bool      // something is mounted at Target
	Changed time.Time // when vol_data.json was written; zero if it cannot be read
	Problem Problem   // empty: none
	Detail  string    // why it is Broken

	Handle string // the volume ID that the driver gave it
}

// Settling is how long Unmounted and Unused may be a normal state that the kubelet is about to
// change: a call to a driver may take 2 minutes, and the next one comes up to 2 minutes later.
const Settling = 5 * time.Minute

// perDriver returns the number of volumes of each driver, including those with a problem: the
// kubelet will tell the driver to unpublish and unstage them.
func perDriver(all []Volume) map[string]status.Volumes {
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

// countLimit limits how long Count waits for the kubelet's files.
const countLimit = 2 * time.Second

// Count counts what Read finds with this machine's mounts. The error is a
// *worker.NotAnswering if the file system does not answer.
func Count(ctx context.Context, pool *worker.Pool, rootDir string) (map[string]status.Volumes, error) {
	var found []Volume
	err, late := worker.Do(ctx, pool.Slot(rootDir, nil), countLimit, func() (err error) {
		found, err = Read(rootDir, "/proc")
		return err
	}, nil)
	if late != nil {
		return nil, late // found belongs to the abandoned call
	}
	return perDriver(found), err
}

// Read reads the files of the kubelet with this root directory, and self/mountinfo in proc. It
// never touches files below a mount point, but blocks for as long as the file system of the root
// directory does not answer. After an error it returns what it could read, without Unmounted and
// Unused.
func Read(rootDir, proc string) ([]Volume, error) {
	r := &reader{left: maxNames, mounts: map[string]bool{}}
	mounts, err := Mounts(proc, "self")
	if err == nil {
		for _, m := range mounts {
			r.mounts[m.Point] = true
		}
		r.within(filepath.Join(rootDir, "pods"), r.pods)
		r.within(filepath.Join(rootDir, "plugins/kubernetes.io/csi"), r.staged)
		err = r.err
	}
	if err != nil {
		return r.volumes, fmt.Errorf("cannot read the volumes: %w", err)
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

// add adds a volume, whose paths are relative, if it exists: the kubelet creates its directory
// before it writes vol_data.json.
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
	v.Changed, v.Driver, v.Handle = changed, data["driverName"], data["volumeHandle"]
	r.volumes = append(r.volumes, v)
}

// compare finds the problems that only other volumes show.
func (r *reader) compare() {
	published := map[[2]string]bool{}
	for _, v := range r.volumes {
		if v.Pod != "" {
			published[[2]string{v.Driver, v.Handle}] = true
		}
	}
	for i := range r.volumes {
		v := &r.volumes[i]
		switch {
		case v.Problem != "":
		case v.Pod == "" && !published[[2]string{v.Driver, v.Handle}]:
			v.Problem = Unused
		case v.Pod != "" && !v.Block && !v.Mounted:
			v.Problem = Unmounted
		}
	}
	slices.SortFunc(r.volumes, func(a, b Volume) int {
		return cmp.Or(cmp.Compare(a.Dir, b.Dir), cmp.Compare(a.Target, b.Target))
	})
}
