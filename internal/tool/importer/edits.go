package importer

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
)

// Edits lists the changes to a workload when csi-registrar replaces its registrars.
type Edits struct {
	Workload string // as "FILE: KIND NAMESPACE/NAME"
	// Whole means that nothing useful is left without the registrars: delete the workload.
	Whole      bool
	Containers []ContainerRef
	Reduce     []ControllersRef
	Unmount    []MountRef
	Mount      []MountRef
	Volumes    []string
	Keep       []string // sentences that name a container to keep, and why
	Warnings   []string
}

// ContainerRef is a container and the list of the pod that contains it.
type ContainerRef struct{ List, Name string }

// ControllersRef is an all-in-one sidecar, and what it runs without the registrar.
type ControllersRef struct{ Container, Controllers string }

// MountRef is a mount of a volume in a container.
type MountRef struct {
	Container string
	Volume    string
	Path      string // the mountPath
	SubPath   string
}

// socketDirMount is where to mount the directory of the driver's socket if only the mount creates
// that directory. No image has files there that the mount could hide.
const socketDirMount = "/csi-socket-dir"

// addEdits adds the edits of each workload whose registrars were imported.
func (res *Result) addEdits(rs []*registration) {
	for len(rs) > 0 {
		w := rs[0].workload // its registrations follow each other
		var imported []*registration
		for ; len(rs) > 0 && rs[0].workload == w; rs = rs[1:] {
			isIn := func(r Registrar) bool {
				return r.Driver.Name == rs[0].driver && slices.Contains(r.Workloads, w.String())
			}
			if slices.ContainsFunc(res.Registrars, isIn) {
				imported = append(imported, rs[0])
			}
		}
		if len(imported) > 0 {
			res.Edits = append(res.Edits, w.edits(imported))
		}
	}
}

// edits derives the changes that remove registrars.
func (w *workload) edits(rs []*registration) Edits {
	e := Edits{Workload: w.String()}
	isReplaced := func(c container) bool {
		return slices.ContainsFunc(rs, func(r *registration) bool { return r.container.Name == c.Name })
	}
	var rest []container
	for _, c := range w.pod.all() {
		if !isReplaced(c) {
			rest = append(rest, c)
			continue
		}
		others := slices.DeleteFunc(c.controllers(), func(name string) bool { return name == registrarName })
		if len(others) > 0 {
			e.Reduce = append(e.Reduce, ControllersRef{c.Name, strings.Join(others, ",")})
			c.Args = slices.Concat(c.Args, []string{e.Reduce[len(e.Reduce)-1].flag()})
			rest = append(rest, c)
			continue
		}
		list := "containers"
		if slices.ContainsFunc(w.pod.InitContainers, func(i container) bool { return i.Name == c.Name }) {
			list = "initContainers"
		}
		e.Containers = append(e.Containers, ContainerRef{list, c.Name})
	}
	e.Whole = !slices.ContainsFunc(rest, func(c container) bool { return !c.isLivenessProbe() })
	if !e.Whole {
		e.unmountRegistry(w, rest)
		e.removeVolumes(w, rs, rest)
		for _, c := range rest {
			if c.isLivenessProbe() {
				e.Keep = append(e.Keep, fmt.Sprintf("keep the container %s: the kubelet uses it to restart a driver that hangs, which csi-registrar does not do", safetext.Word(c.Name)))
			}
		}
		e.checkPropagation(w, rs, rest)
	}
	if m := w.manager(); m != "" {
		e.Warnings = append(e.Warnings, "this workload is managed by "+m+", which restores the sidecar: see rollout.md, way B")
	}
	return e
}

// unmountRegistry finds the containers that can interfere with csi-registrar's socket.
func (e *Edits) unmountRegistry(w *workload, rest []container) {
	for _, v := range w.pod.Volumes {
		if v.HostPath == nil || path.Base(path.Clean(v.HostPath.Path)) != rootdir.PluginsRegistryName {
			continue
		}
		for _, c := range rest {
			if c.isRegistrar() {
				continue // of another driver, which was refused
			}
			for _, m := range c.VolumeMounts {
				if m.Name == v.Name {
					e.Unmount = append(e.Unmount, MountRef{c.Name, v.Name, m.MountPath, m.SubPath})
				}
			}
		}
	}
}

// removeVolumes finds the volumes that only the registrars mount. A volume that creates the
// directory of the driver's socket is not removed but mounted elsewhere: the kubelet ignores a
// volume that no container mounts, and the driver cannot bind its socket in a directory that does
// not exist.
func (e *Edits) removeVolumes(w *workload, rs []*registration, rest []container) {
	stillMounted := func(v volume) bool {
		return slices.ContainsFunc(rest, func(c container) bool {
			return slices.ContainsFunc(c.VolumeMounts, func(m volumeMount) bool {
				return m.Name == v.Name && !slices.Contains(e.Unmount, MountRef{c.Name, v.Name, m.MountPath, m.SubPath})
			})
		})
	}
	// createdOtherwise reports whether a volume that stays creates the directory.
	createdOtherwise := func(dir string) bool {
		return slices.ContainsFunc(w.pod.Volumes, func(v volume) bool {
			return v.HostPath != nil && v.HostPath.creates() && rootdir.Within(path.Clean(v.HostPath.Path), dir) && stillMounted(v)
		})
	}
	isRemoved := func(c container) bool {
		return slices.ContainsFunc(e.Containers, func(ref ContainerRef) bool { return ref.Name == c.Name })
	}
	for _, v := range w.pod.Volumes {
		unmounted := slices.ContainsFunc(w.pod.all(), func(c container) bool { return isRemoved(c) && c.mounts(v.Name) }) ||
			slices.ContainsFunc(e.Unmount, func(m MountRef) bool { return m.Volume == v.Name })
		if !unmounted || stillMounted(v) {
			continue
		}
		i := slices.IndexFunc(rs, func(r *registration) bool {
			mount := r.container.mountOf(r.address)
			if mount.Name != v.Name || v.HostPath == nil || !v.HostPath.creates() {
				return false
			}
			dir, err := r.pod.hostPath(r.container, mount.MountPath)
			return err == nil && !createdOtherwise(dir) && !rootdir.Within(path.Join(r.rootDir, "plugins"), dir)
		})
		if i < 0 {
			e.Volumes = append(e.Volumes, v.Name)
			continue
		}
		e.Mount = append(e.Mount, MountRef{w.driverContainer(rs[i], rest), v.Name, socketDirMount, rs[i].container.mountOf(rs[i].address).SubPath})
	}
}

// checkPropagation warns if the mounts of a driver do not reach the kubelet. Any container of the
// pod can be the one that mounts.
func (e *Edits) checkPropagation(w *workload, rs []*registration, rest []container) {
	for _, r := range rs {
		pods := path.Join(r.rootDir, "pods")
		name := w.driverContainer(r, rest)
		why := fmt.Sprintf("the container %s does not mount %s", safetext.Word(name), safetext.Word(pods))
		reaches := false
		for _, c := range rest {
			host, err := w.pod.hostPath(c, pods)
			m := c.mountOf(pods)
			switch {
			case m.MountPath == "":
			case err == nil && host == pods && m.Propagation == "Bidirectional":
				reaches = true
			case c.Name != name:
			case err == nil && host != pods:
				why = fmt.Sprintf("the container %s has %s of the node at %s", safetext.Word(name), safetext.Word(host), safetext.Word(pods))
			default:
				why = fmt.Sprintf("the mount of the volume %s in the container %s has no mountPropagation: Bidirectional", safetext.Word(m.Name), safetext.Word(name))
			}
		}
		if !reaches {
			e.Warnings = append(e.Warnings, why+": volumes do not reach the pods, unless the driver mounts on the node itself (nsenter)")
		}
	}
}

// driverContainer returns the name of the container that serves the socket, as far as the manifest
// shows it: one that is given its path, else one that sees it, else any that is no sidecar.
func (w *workload) driverContainer(r *registration, rest []container) string {
	sees := func(c container) bool {
		return slices.ContainsFunc(c.VolumeMounts, func(m volumeMount) bool {
			host, err := w.pod.hostPath(c, m.MountPath)
			return err == nil && rootdir.Within(r.socket, host)
		})
	}
	hasPath := func(c container) bool {
		words := slices.Concat(c.Command, c.Args)
		for _, e := range c.Env {
			words = append(words, e.Value)
		}
		return sees(c) && slices.ContainsFunc(words, func(s string) bool { return strings.HasSuffix(s, "/"+path.Base(r.socket)) })
	}
	isAny := func(container) bool { return true }
	for _, match := range []func(container) bool{hasPath, sees, isAny} {
		for _, c := range w.pod.Containers {
			if !c.isSidecar() && match(c) {
				return c.Name
			}
		}
	}
	return rest[0].Name
}

// flag is the flag that overrides the list in the manifest.
func (r ControllersRef) flag() string { return "--controllers=" + r.Controllers }

func (c container) mounts(volume string) bool {
	return slices.ContainsFunc(c.VolumeMounts, func(m volumeMount) bool { return m.Name == volume })
}

// Lines describes the edits, one in each line.
func (e Edits) Lines() []string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if e.Whole {
		add("delete it: it has nothing but its registrar")
	} else {
		for _, c := range e.Containers {
			add("remove the container %s (under %s), with its probes, ports and lifecycle", safetext.Word(c.Name), c.List)
		}
	}
	for _, r := range e.Reduce {
		add("in the container %s, replace --controllers with %s", safetext.Word(r.Container), safetext.Word(r.flag()))
	}
	for _, m := range e.Unmount {
		add("remove the mount of the volume %s (%s) from the container %s, which could remove csi-registrar's socket there",
			safetext.Word(m.Volume), safetext.Word(m.Path), safetext.Word(m.Container))
	}
	for _, v := range e.Volumes {
		add("remove the volume %s, which no other container mounts", safetext.Word(v))
	}
	for _, m := range e.Mount {
		sub := ""
		if m.SubPath != "" {
			sub = ", subPath: " + safetext.Word(m.SubPath)
		}
		add("keep the volume %s and mount it in the container %s (mountPath: %s%s, readOnly: true): the directory of the driver's socket "+
			"is created for it, and only if a container mounts it", safetext.Word(m.Volume), safetext.Word(m.Container), m.Path, sub)
	}
	lines = append(lines, e.Keep...)
	return append(lines, e.Warnings...)
}
