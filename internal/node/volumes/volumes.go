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
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/worker"
)

// Volume is a volume that is staged, or published to one pod. Its strings are untrusted.
type Volume struct {
	Driver string // empty where vol_data.json cannot be read
	Pod    string // the pod's UID; empty: staged, for all pods
	Dir    string // the directory of vol_data.json
	Target string // the path at which the driver stages or publishes it
	Block  bool   // a device, not a file system

	Mounted bool      // something is mounted at Target
	Changed time.Time // when vol_data.json was last written; zero if it cannot be read
	Since   time.Time // when Dir got its last name; only if nothing is mounted

	Handle string // the volume ID that the driver gave it
}

// Unmounted reports whether a volume is published as a file system and nothing is mounted there.
func (v Volume) Unmounted() bool { return v.Pod != "" && !v.Block && !v.Mounted && v.Driver != "" }

// perDriver returns the number of volumes of each driver. It is an error if a volume is mounted and
// its driver is not known.
func perDriver(all []Volume) (counts map[string]status.Volumes, err error) {
	counts = map[string]status.Volumes{}
	for _, v := range all {
		c := counts[v.Driver]
		switch {
		case v.Driver == "" && v.Mounted:
			err = fmt.Errorf("cannot read the volumes: %q names no driver, and the volume is mounted", v.Dir+"/vol_data.json")
		case v.Pod == "":
			c.Staged++
		case !v.Unmounted():
			c.Published++
		case time.Since(v.Since).Abs() >= Slow:
			c.Late++
			fallthrough
		default:
			c.Waiting++
		}
		counts[v.Driver] = c
	}
	delete(counts, "")
	return counts, err
}

// Slow is how long a pod may wait for a volume before that is worth reporting.
const Slow = time.Minute

// countLimit limits how long Count waits for the kubelet's files.
const countLimit = 2 * time.Second

// Count counts what Read finds with this machine's mounts. After an error about one volume it has
// the others. The error is a *worker.NotAnswering if the file system does not answer.
func Count(ctx context.Context, pool *worker.Pool, rootDir string, kubelet int) (map[string]status.Volumes, error) {
	found, err := worker.Get(ctx, pool.Slot(rootDir, nil), countLimit, func() ([]Volume, error) {
		return Read(rootDir, "/proc", kubelet)
	}, nil)
	if err != nil {
		return nil, err
	}
	return perDriver(found)
}

// Read reads the files of the kubelet with this root directory and pid, which can have a mount
// namespace of its own, and the mounts of both processes. It never touches files below a mount
// point, but blocks for as long as the file system of the root directory does not answer. After an
// error it returns what it could read.
func Read(rootDir, proc string, kubelet int) ([]Volume, error) {
	r := &reader{left: maxNames, mounts: map[string]bool{}, kubelets: map[string]bool{}}
	mounts, err := mountinfo.Read(proc, "self")
	if err == nil {
		for _, m := range mounts {
			r.mounts[m.Point] = true
		}
		// An error: it is not known, or has ended.
		mounts, _ = mountinfo.Read(proc, strconv.Itoa(kubelet))
		for _, m := range mounts {
			r.kubelets[m.Point] = true
		}
		r.within(filepath.Join(rootDir, "pods"), r.pods)
		r.within(filepath.Join(rootDir, "plugins/kubernetes.io/csi"), r.staged)
		err = r.err
	}
	if err != nil {
		return r.volumes, fmt.Errorf("cannot read the volumes: %w", err)
	}
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
			r.add(Volume{Driver: driver, Dir: dir, Target: dir + "/globalmount"})
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
// before it writes vol_data.json. If that names no driver, a mounted volume is that of v.Driver.
func (r *reader) add(v Volume) {
	text, changed, err := r.read(v.Dir + "/vol_data.json")
	r.fail(filepath.Join(r.path, v.Dir, "vol_data.json"), err)
	dir := v.Dir
	v.Dir, v.Target = filepath.Join(r.path, v.Dir), filepath.Join(r.path, v.Target)
	v.Mounted = r.mounts[v.Target] || r.kubelets[v.Target]
	if errors.Is(err, fs.ErrNotExist) && !v.Mounted {
		return
	}
	var data map[string]string // as the kubelet decodes it
	// A file that is missing or damaged names no driver.
	_ = json.NewDecoder(strings.NewReader(text)).Decode(&data)
	v.Changed, v.Handle = changed, data["volumeHandle"]
	if name := data["driverName"]; name != "" || !v.Mounted {
		v.Driver = name
	}
	if v.Unmounted() {
		v.Since = r.changed(dir)
	}
	r.volumes = append(r.volumes, v)
}

// DropRegistered removes the drivers from counts that have a registration socket in registry, on
// which somebody listens. If it does not answer, its name tells the driver.
func DropRegistered(ctx context.Context, pool *worker.Pool, registry string, counts map[string]status.Volumes) error {
	if len(counts) == 0 {
		return nil
	}
	sockets, err := worker.Get(ctx, pool.Slot(registry, nil), time.Second, func() ([]string, error) { return pluginreg.Sockets(registry) }, nil)
	for _, path := range sockets {
		driver, ok := rootdir.DriverName(filepath.Base(path))
		if _, inUse := counts[driver]; ok && !inUse {
			continue
		}
		name, late := worker.Do(ctx, pool.Slot(path, nil), 2*time.Second, func() string {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			info, _, err := pluginreg.GetInfo(ctx, path)
			if ok && err != nil && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist) {
				return driver
			}
			return info.Name
		}, nil)
		if late == nil {
			delete(counts, name)
		}
	}
	return err
}
