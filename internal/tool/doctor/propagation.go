package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/safetext"
)

// podMount is a directory of a volume, as a process has it. In a pod that has the volume the root
// of the mount is in the volume; in one that has the directory below, it is the kubelet's
// directory.
type podMount struct {
	mountinfo.Mount
	pid int
}

// misplaced is a volume whose mount is missing where it is needed.
type misplaced struct {
	volumes.Volume
	pods []podMount // the processes that have the directory below it
}

// mounts finds volumes of a driver that are not mounted where their pods use them, pods that wait,
// and what keeps the mounts of who, the process that serves the driver, from the kubelet and the
// container runtime.
func (x *diagnosis) mounts(ctx context.Context, d config.Driver, who process) {
	if x.kubelet == nil || x.volumesErr != nil {
		return
	}
	wrong, working := x.misplaced(ctx, d.Name, who)
	why, repair := "", []Fix(nil)
	// A driver can also mount in another namespace than its own, with nsenter(1).
	if who.pid > 0 && (!working || len(wrong) > 0) {
		why, repair = x.unreachable(ctx, who)
	}
	if why != "" {
		x.finding(d.Name, "volumes", "mounts-not-propagated", why+"; unless it mounts elsewhere, pods get a directory of the node's disk in place of a volume",
			"what the driver mounts below the kubelet's directory appears there for all others; a driver that mounts with nsenter(1), or through a service of the host, does without", repair...)
		why = "; " + why
	}
	if len(wrong) > 0 {
		x.finding(d.Name, "volumes", "volume-misplaced", "the driver's mount is missing for the kubelet or the pods, which write to the node's disk instead: "+x.describe(ctx, wrong)+why,
			"the kubelet and each container of the pod have the driver's mount", x.rescue(ctx, wrong, repair, who.inPod)...)
		return
	}
	var pods []podWait
	ran := x.runsFor(who.pid)
	for _, w := range x.waiting {
		if w.driver != d.Name {
			continue
		}
		if since := time.Since(w.at); !w.at.IsZero() && ran > 0 && since > ran {
			w.text += ", before the driver started: the kubelet tries again within 2 minutes"
		}
		pods = append(pods, w)
	}
	if len(pods) > 0 {
		server := x.serverOf(ctx, d.Name, who)
		set, fix := "", x.logs(d, server)
		if server.unit != "" {
			why, undo := x.blame(ctx, server.unit, "")
			if wrong, correct := x.obstacles(ctx, server.unit, pods[0].text); !strings.Contains(why, wrong) {
				why, undo = why+wrong, append(correct, undo...)
			}
			set, fix = strings.Replace(why, ": ", "; the driver logged ", 1), append(append(fix, undo...),
				note("if the driver hangs, and volumes that are mounted survive its restart:"), optional(server.start()[0]))
		}
		x.podsWait(d.Name, pods, set, fix)
	}
}

// mountsOf returns the mounts that a process sees, by its name in /proc; none if they cannot be
// read.
func (x *diagnosis) mountsOf(ctx context.Context, process string) []mountinfo.Mount {
	all, _ := look(ctx, x, x.proc(), func() ([]mountinfo.Mount, error) { return mountinfo.Read(x.proc(), process) })
	return all
}

// shareMounts reports whether two processes are known to have the same mount namespace. To read the
// list of mounts of each driver takes long on a node with many pods.
func (x *diagnosis) shareMounts(ctx context.Context, pid, other int) bool {
	same, err := look(ctx, x, x.proc(), func() (bool, error) {
		a, err := os.Readlink(x.procPath(pid, "ns", "mnt"))
		b, otherErr := os.Readlink(x.procPath(other, "ns", "mnt"))
		return a == b, errors.Join(err, otherErr)
	})
	return same && err == nil
}

// podMounts finds the directories of volumes, and the logs of containers that run, in all mount
// namespaces.
func (x *diagnosis) podMounts(ctx context.Context) []podMount {
	if len(x.volumes) == 0 {
		return nil
	}
	all, _ := look(ctx, x, x.proc(), func() (all []podMount, err error) {
		for _, process := range mountinfo.Namespaces(x.proc()) {
			mounts, _ := mountinfo.Read(x.proc(), process) // an error: it has ended
			pid, _ := strconv.Atoi(process)
			for _, m := range mounts {
				// The kubelet's own mount of a subPath is in none of the pods.
				volume := strings.Contains(m.Root, "/volumes/kubernetes.io~csi/") || strings.Contains(m.Root, saved)
				if log := strings.Contains(m.Root, "/containers/"); (volume || log) && !strings.Contains(m.Point, "/volume-subpaths/") {
					all = append(all, podMount{m, pid})
				}
			}
		}
		return all, nil
	})
	return all
}

// ending returns the part of a volume's path that is the same for all processes: the kubelet's
// directory can be at different paths.
func ending(target string) string {
	parts := strings.Split(target, "/")
	return "/" + strings.Join(parts[max(0, len(parts)-5):], "/")
}

// mountAt returns the mount of a volume in a list; the zero Mount if there is none.
func mountAt(all []mountinfo.Mount, target string) (m mountinfo.Mount) {
	end := ending(target)
	for _, other := range all { // a later one covers an earlier one
		if strings.HasSuffix(other.Point, end) {
			m = other
		}
	}
	return m
}

// misplaced returns the volumes of a driver that are mounted for the process who, and not for the
// kubelet, and those whose pods have the directory below. working means that a volume is mounted
// for the kubelet, and not from before the start of who.
func (x *diagnosis) misplaced(ctx context.Context, driver string, who process) (wrong []misplaced, working bool) {
	if x.volumesOf(driver) == 0 {
		return nil, false
	}
	kubelets, before, after := x.kubeletMounts, []mountinfo.Mount(nil), []mountinfo.Mount(nil)
	if !x.shareMounts(ctx, who.pid, x.kubelet.pid) {
		before = x.mountsOf(ctx, strconv.Itoa(who.pid))
		kubelets = x.mountsOf(ctx, strconv.Itoa(x.kubelet.pid))
		// A volume that was unmounted meanwhile is not in it.
		after = x.mountsOf(ctx, strconv.Itoa(who.pid))
	}
	if kubelets == nil {
		return nil, false
	}
	runs := x.runsFor(who.pid)
	for _, v := range x.volumes {
		if v.Driver != driver || v.Block {
			continue
		}
		k := mountAt(kubelets, v.Target)
		below := slices.DeleteFunc(slices.Clone(x.inPods), func(p podMount) bool {
			// the driver mounts a directory on itself
			same := k.Point != "" && k.Device == p.Device && rootdir.Within(p.Root, k.Root)
			below := strings.Contains(p.Root+"/", ending(v.Target)+"/") || strings.Contains(p.Root+"/", savedIn(v)+"/")
			return same || !below || strings.HasSuffix(p.Point, ending(v.Target))
		})
		own := mountAt(before, v.Target).Point != "" && mountAt(after, v.Target).Point != ""
		switch {
		case len(below) > 0 || own && k.Point == "":
			wrong = append(wrong, misplaced{v, below})
		case k.Point != "" && (runs == 0 || time.Since(v.Changed) < runs):
			working = true
		}
	}
	return wrong, working
}

// unreachable returns why mounts of a process do not reach the kubelet, or the container runtime,
// and how to repair that; empty if they do, or if that cannot be found out.
func (x *diagnosis) unreachable(ctx context.Context, who process) (why string, fix []Fix) {
	pods := path.Join(x.config.Config.Kubelet.RootDir, "pods")
	view := func(p process) (mountinfo.View, error) {
		return look(ctx, x, x.procPath(p.pid, "root", pods), func() (mountinfo.View, error) {
			return memo(x, p.pid, func() (mountinfo.View, error) { return mountinfo.Look(x.proc(), strconv.Itoa(p.pid), pods) })
		})
	}
	masters := func() map[string]string { return mountinfo.Masters(x.proc()) }
	to, err := view(x.kubelet.process)
	if err != nil {
		return "", nil
	}
	from, err := view(who)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return x.hidden(ctx, who, "has no "+safetext.Word(pods))
	case err != nil:
		return "", nil
	case !from.Same(to):
		return x.hidden(ctx, who, "has another directory than the kubelet at "+safetext.Word(pods))
	case !from.Propagates(to, masters):
		return x.hidden(ctx, who, "mounts where the kubelet does not see it")
	}
	for _, runtime := range x.runtimes {
		to, err := view(runtime)
		switch {
		case err != nil:
		case from.Same(to) && from.Propagates(to, masters): // of several any can be the kubelet's
			return "", nil
		default:
			why, fix = x.hidden(ctx, runtime, "does not see the mounts of "+who.String())
		}
	}
	return why, fix
}

// hidden explains the namespace of a process: with what it is, and how to leave it.
func (x *diagnosis) hidden(ctx context.Context, p process, what string) (why string, fix []Fix) {
	why = p.String() + " " + what
	root := safetext.ShellWord(x.config.Config.Kubelet.RootDir)
	lines, resets := x.namespaceSettings(ctx, p.unit)
	switch {
	case p.inPod:
		why += ": that depends on the volumeMounts of its container"
		return why, []Fix{note("in the workload, mount the hostPath %s at the same path into the container, with mountPropagation: Bidirectional", root)}
	case p.unit == "":
		return why, nil
	case p.confined && len(lines) == 0:
		return why, []Fix{note("in what starts the container, add the volume %s:%s:rshared", root, root), systemctl("restart", p.unit)}
	case len(lines) == 0:
		return why, []Fix{note("start it in the mount namespace of the host"), run("systemctl", "--no-pager", "cat", p.unit), systemctl("restart", p.unit)}
	}
	file := "/etc/systemd/system/" + p.unit + ".d/zz-doctor-mounts.conf"
	return why + ": " + strings.Join(lines, ", "), []Fix{
		run("mkdir", "-p", path.Dir(file)), write(file, append([]string{"[Service]"}, resets...)...),
		run("systemctl", "daemon-reload"), systemctl("restart", p.unit),
	}
}

// namespaceResets are the directives that give a unit a mount namespace, with the value that does
// not.
var namespaceResets = strings.Fields(`BindPaths= BindReadOnlyPaths= ExecPaths= InaccessiblePaths= MountAPIVFS=no MountFlags= NetworkNamespacePath=
	NoExecPaths= PrivateDevices=no PrivateIPC=no PrivateMounts=no PrivateNetwork=no PrivateTmp=no ProcSubset=all ProtectControlGroups=no
	ProtectHome=no ProtectKernelLogs=no ProtectKernelModules=no ProtectKernelTunables=no ProtectProc=default ProtectSystem=no
	ReadOnlyPaths= ReadWritePaths= TemporaryFileSystem=`)

// namespaceSettings returns which lines of which files give a unit a mount namespace, and the lines
// of a drop-in that resets them.
func (x *diagnosis) namespaceSettings(ctx context.Context, unit string) (found, resets []string) {
	if !strings.HasSuffix(unit, ".service") {
		return nil, nil
	}
	set := map[string]string{}
	for _, file := range x.unitFiles(ctx, unit) {
		for line := range strings.Lines(string(x.readFile(ctx, file))) {
			line = strings.TrimSpace(line)
			key, value, _ := strings.Cut(line, "=")
			if slices.Contains([]string{"", "no", "false", "off", "0", "default", "all", "shared"}, value) {
				delete(set, key)
			} else {
				set[key] = safetext.Word(line) + " in " + safetext.Word(file)
			}
		}
	}
	for _, reset := range namespaceResets {
		key, _, _ := strings.Cut(reset, "=")
		if set[key] != "" {
			found, resets = append(found, set[key]), append(resets, reset)
		}
	}
	return found, resets
}
