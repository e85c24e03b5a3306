package daemon

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// volumeCount has the volumes in use below a root_dir. They are counted once, when they are needed.
type volumeCount struct {
	count   func() (map[string]status.Volumes, error)
	ignored bool // the user wants to withdraw drivers whose volumes are in use
	status  func() status.Document
}

func (d *daemon) newVolumeCount(ctx context.Context, rootDir string, ignored bool) *volumeCount {
	return &volumeCount{sync.OnceValues(func() (map[string]status.Volumes, error) {
		return volumes.Count(ctx, d.pool, rootDir, 0)
	}), ignored, d.agent.Status}
}

// inUse describes the volumes of a driver that are in use; empty: there are none.
func (v *volumeCount) inUse(driver string) string {
	all, err := v.count()
	switch n := all[driver].InUse(); {
	case n > 0:
		return safetext.Count(n, "volume") + " in use"
	case err != nil:
		return "an unknown number of volumes in use (" + err.Error() + ")"
	}
	return ""
}

// mustStay returns why a driver whose table disappeared is not withdrawn yet; empty: it can be,
// also because another registrar serves it, so that there is nothing to withdraw. Without the
// registration the kubelet could not unmount its volumes.
func (v *volumeCount) mustStay(driver string) string {
	d, _ := v.status().Driver(driver)
	if inUse := v.inUse(driver); inUse != "" && !v.ignored && d.ServedBy.PID == 0 {
		return inUse + ", no table: it is withdrawn when they are unmounted, or by csi-registrar reload --force"
	}
	return ""
}

// nodeVolumes counts the volumes of all drivers. A look returns the last numbers, and has them
// counted again if they are older than countEvery.
type nodeVolumes struct {
	mu    sync.Mutex
	begun time.Time           // of the last count
	last  *status.NodeVolumes // nil: not known
}

const countEvery = time.Minute

func (u *nodeVolumes) look(d *daemon, s status.Document) *status.NodeVolumes {
	u.mu.Lock()
	defer u.mu.Unlock()
	// With flags of node-driver-registrar root_dir is not known.
	if time.Since(u.begun) >= countEvery && d.options.KeepSockets {
		u.begun = time.Now()
		d.live.run(func() {
			n, err := countVolumes(d.live.ctx, d.pool, s)
			if err != nil {
				d.log.Debug("counting the volumes of all drivers", "error", err)
			}
			u.mu.Lock()
			defer u.mu.Unlock()
			if u.last = nil; err == nil {
				u.last = &n
			}
		})
	}
	return u.last
}

// countVolumes counts the volumes of all drivers, and those of drivers without a registration
// socket.
func countVolumes(ctx context.Context, pool *worker.Pool, s status.Document) (n status.NodeVolumes, err error) {
	registry := string(s.PluginsRegistry) // our own document
	all, err := volumes.Count(ctx, pool, filepath.Dir(registry), s.Kubelet.PID)
	for _, v := range all {
		n.Published += v.Published
		n.Waiting += v.Waiting
		n.Late += v.Late
	}
	for _, d := range s.Drivers {
		if d.Registration != status.None {
			delete(all, d.Name)
		}
	}
	if err != nil {
		return n, err
	}
	err = volumes.DropRegistered(ctx, pool, registry, all)
	for _, v := range all {
		n.Unregistered += v.InUse()
	}
	return n, err
}

// hostMounts has the mounts that the kubelet and systemd see. Those of the sandbox are copies:
// mounts on the host propagate to them, except over or below a mount of the sandbox's own.
const hostMounts = "/proc/1/mountinfo"

// hiddenFromHost returns which directory the host has at a path, and reports whether it is another
// one than this process has. If it is the same as in the last view, so is the answer: nearly all
// mounts are elsewhere. hiddenFromHost blocks for as long as the file system does not answer.
func hiddenFromHost(path string, last view) (onHost string, hidden bool, err error) {
	if path, err = filepath.EvalSymlinks(path); err != nil { // as in mountinfo
		return "", false, err
	}
	onHost, err = locateIn("1", path)
	if err != nil || onHost == last.onHost {
		return onHost, err == nil && last.hidden, err
	}
	here, err := locateIn("self", path)
	return onHost, err == nil && here != onHost, err
}

// locateIn returns the file system of a path, and the name that the path has in it, for a process.
func locateIn(process, path string) (string, error) {
	all, err := mountinfo.Read("/proc", process)
	if err != nil {
		return "", err
	}
	return locate(all, path)
}

func locate(all []mountinfo.Mount, path string) (string, error) {
	above := slices.DeleteFunc(all, func(m mountinfo.Mount) bool { return !rootdir.Within(path, m.Point) })
	// Follow the path from the root: of the mounts on a mount the first one on the way counts,
	// because it hides the deeper ones.
	var top mountinfo.Mount
	if i := slices.IndexFunc(above, func(m mountinfo.Mount) bool { return m.Point == "/" }); i >= 0 {
		top = above[i]
	}
	for next := (mountinfo.Mount{}); ; next = (mountinfo.Mount{}) {
		for _, m := range above {
			if m.Parent == top.ID && m.ID != top.ID && (next.ID == "" || len(m.Point) < len(next.Point)) {
				next = m
			}
		}
		if next.ID == "" {
			rest, err := filepath.Rel(top.Point, path)
			return top.Device + " " + filepath.Join(top.Root, rest), err
		}
		top = next
	}
}
