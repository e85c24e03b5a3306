package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// readVolumes finds the volumes that are in use.
func (x *diagnosis) readVolumes(ctx context.Context) {
	root := x.config.Config.Kubelet.RootDir
	// Not root itself: if only a file system below it hangs, later looks at root must not wait too.
	x.volumes, x.volumesErr = look(ctx, x, path.Join(root, "{pods,plugins}"), func() ([]volumes.Volume, error) { return volumes.Read(root, x.proc(), 0) })
}

// settling is how long a published volume may be without a mount: the kubelet writes vol_data.json
// before it calls the driver, which may take 2 minutes, and calls again up to 2 minutes later.
const settling = 5 * time.Minute

// checkVolumes reports volumes that are published to a pod without a mount, and finds pods that
// wait.
func (x *diagnosis) checkVolumes(ctx context.Context) {
	if errors.As(x.volumesErr, new(*worker.NotAnswering)) {
		root := x.config.Config.Kubelet.RootDir
		where, fix := x.unmount(ctx, cmp.Or(x.hanging(ctx, path.Join(root, "pods")), x.hanging(ctx, path.Join(root, "plugins")), root))
		x.finding("", "volumes", "volumes-unreadable", "a file system below pods or plugins of "+safetext.Word(root)+" does not answer, so that no volume can be mounted there"+where,
			"it answers", fix...)
		return
	}
	if x.volumesErr != nil {
		x.checked("", "volumes", Skipped, "the volumes cannot be read: %v", x.volumesErr)
		return
	}
	// With OpenShift's kubens.service the kubelet and the pods have a mount namespace of their own,
	// and what a driver in a pod mounts does not reach the node's.
	var kubelets []mountinfo.Mount
	if x.kubelet != nil {
		kubelets = x.mountsOf(ctx, x.kubelet.pid)
	}
	staged, published, waiting := 0, 0, 0
	unmounted := map[string][]string{} // directories, by driver
	x.waiting = x.failedMounts(ctx)
	for _, v := range x.volumes {
		switch {
		case v.Pod == "":
			staged++
		case !v.Unmounted() || mountAt(kubelets, v.Target).Point != "":
			published++
			delete(x.waiting, podVolume{v.Pod, v.Driver, v.Handle})
		case time.Since(v.Changed).Abs() >= settling:
			unmounted[v.Driver] = append(unmounted[v.Driver], safetext.Word(v.Dir))
		default:
			waiting++
			inline := x.waiting[podVolume{v.Pod, "", v.Pod + "-" + path.Base(v.Dir)}]
			key, late := podVolume{v.Pod, v.Driver, v.Handle}, time.Since(v.Since).Abs() >= volumes.Slow
			switch {
			case inline != "":
				x.waiting[key] = inline
			case x.waiting[key] == "" && late:
				x.waiting[key] = safetext.Word(v.Pod)
			}
		}
	}
	x.checked("", "volumes", OK, "%d mounted for pods, %d not yet, %d staged", published, waiting, staged)
	for _, d := range sortedKeys(unmounted) {
		if x.selected(d) && csiname.CheckName(d) == nil {
			x.finding(d, "volumes", "volume-not-mounted", "published, and nothing is mounted there: "+some(unmounted[d])+": the kubelet does not check again while it runs",
				"a mount, unless this driver publishes without one",
				note("the kubelet, restarted, publishes again what a pod still uses, and unpublishes the rest"), x.kubelet.restart())
		}
	}
}

// podVolume is a volume of a driver in a pod. Of an inline volume the kubelet logs no driver, and
// the pod with the volume's name as its handle.
type podVolume struct{ pod, driver, handle string }

// failedMount matches an error of the kubelet's operation executor (kubelet v1.37).
const failedMount = `failed for volume .*?\(UniqueName: \\*"kubernetes\.io/csi/(?:([^\\"^]+)\^)?([^\\"]*)\\*"\) pod \\*"([^\\"]+)\\*" \(UID: \\*"([^\\"]+)\\*"\) ?: (.*)`

// failedMounts returns the pods whose volumes the kubelet could not mount in the last minutes, with
// its error. It has no files about them: it removes those that it has written after each try.
func (x *diagnosis) failedMounts(ctx context.Context) map[podVolume]string {
	found, failed := map[podVolume]string{}, regexp.MustCompile(failedMount)
	pods := filepath.Join(x.config.Config.Kubelet.RootDir, "pods")
	for _, line := range x.o.Units.Journal(ctx, x.kubelet.service(), "--since=-5min", "--lines=50", "--grep=failed for volume") {
		m := failed.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if _, err := x.stat(ctx, filepath.Join(pods, m[4])); err == nil { // the pod is not gone
			found[podVolume{m[4], m[1], m[2]}] = fmt.Sprintf("%s (%s), %s", safetext.Word(m[3]), safetext.Word(m[4]), safetext.Quote(strings.TrimSuffix(m[5], `"`)))
		}
	}
	return found
}

// logs returns the commands that show what the kubelet and the driver log about volumes, and the
// calls between them. The process who serves the driver's socket.
func (x *diagnosis) logs(d config.Driver, who process) []Fix {
	server := server{pod: who.pod, container: who.container}
	if strings.HasSuffix(who.unit, ".service") {
		server.unit = who.unit
	}
	trace := path.Join(path.Dir(d.Socket), "trace.sock")
	return slices.Concat([]Fix{run("journalctl", "--no-pager", "-b", "-u", x.kubelet.service(), "-n", "20", "--grep", "kubernetes.io/csi")}, server.log(),
		[]Fix{note("for all calls, with endpoint = %s in the table of the driver, see trace.md: csi-registrar trace --listen %[1]s --connect %s", safetext.ShellWord(trace), safetext.ShellWord(d.Socket))})
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

// some formats the first ones of a list.
func some(list []string) string {
	const shown = 5
	if more := len(list) - shown; more > 0 {
		list = append(slices.Clone(list[:shown]), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(list, ", ")
}

// withoutTable reports drivers whose volumes are in use and that have no enabled table: the kubelet
// cannot unmount the volumes of one that nobody registers, and the daemon withdraws one that it
// still registers as soon as they are unmounted.
func (x *diagnosis) withoutTable(ctx context.Context) {
	var names []string
	for _, v := range x.volumes {
		d, _ := x.config.Config.Driver(v.Driver)
		invalid := slices.Contains(x.config.Faulty, v.Driver) // which is reported
		if x.selected(v.Driver) && csiname.CheckName(v.Driver) == nil && !d.Enabled && !invalid && !slices.Contains(names, v.Driver) {
			names = append(names, v.Driver)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		inUse := count(x.volumesOf(name), "volume") + " in use, "
		_, disabled := x.config.Config.Driver(name)
		switch st, _ := x.daemon.Driver(name); {
		case st.NoTable:
			why, fix := x.lookalike(ctx, name)
			x.finding(name, "configuration", "driver-without-table", inUse+"and no table: it is withdrawn when they are unmounted"+why,
				"a table, or no volumes", fix...)
		case len(x.served[name]) > 0:
		case disabled:
			x.finding(name, "volumes", "volumes-unregistered", inUse+"which the kubelet cannot unmount: nobody registers the driver, whose table has enabled = false in "+x.origin(name, "enabled"),
				"the driver is registered until they are unmounted", x.setDriverKey(name, "enabled", "true")...)
		default:
			why, fix := x.lookalike(ctx, name)
			x.finding(name, "volumes", "volumes-unregistered", inUse+"which the kubelet cannot unmount: nobody registers the driver"+why,
				"the driver is registered until they are unmounted", fix...)
		}
	}
}

// lookalike finds a file that has a table of the driver and is not read because of its name, or the
// socket at which the driver answers. It returns a part of a sentence, which can be empty, and the
// fix.
func (x *diagnosis) lookalike(ctx context.Context, driver string) (why string, fix []Fix) {
	for _, dir := range x.o.Source.Watch() {
		if filepath.Base(dir) != "conf.d" {
			continue
		}
		if empty, _ := look(ctx, x, dir, func() (string, error) { return emptyFile(dir) }); empty != "" {
			why = "; " + safetext.Word(empty) + " is empty"
		}
		file, err := look(ctx, x, dir, func() (string, error) { return ignoredTable(dir, driver) })
		if err != nil || file == "" {
			continue
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(file), "."), ".toml")
		name = strings.TrimSuffix(name, ".conf") + ".toml"
		return "; " + safetext.Word(file) + " has a table for it, and is not read: its name does not end in .toml or begins with a dot",
			[]Fix{run("mv", "-n", file, filepath.Join(dir, name)), reload}
	}
	var d config.Driver
	d.Name, d.Socket, d.SocketOwner = driver, filepath.Join(x.config.Config.Kubelet.RootDir, "plugins", driver, "csi.sock"), "root"
	if socket := x.nearby(ctx, d); socket != "" {
		return why + "; it listens on " + safetext.Word(socket), x.setDriverKey(driver, "socket", safetext.Quote(socket))
	}
	return why, []Fix{note("write a table for %s with its socket into a file in %s", safetext.ShellWord(driver), safetext.ShellWord(x.confDir()))}
}

// emptyFile returns a configuration file in dir of which nothing was written, as on a full disk.
func emptyFile(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if at, err := e.Info(); err == nil && at.Mode().IsRegular() && at.Size() == 0 && strings.HasSuffix(e.Name(), ".toml") {
			return filepath.Join(dir, e.Name()), nil
		}
	}
	return "", err
}

// ignoredTable returns a file in dir with a table of the driver that config.Load ignores.
func ignoredTable(dir, driver string) (string, error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		name, file := e.Name(), filepath.Join(dir, e.Name())
		if !e.Type().IsRegular() || strings.HasSuffix(name, ".toml") && !strings.HasPrefix(name, ".") {
			continue
		}
		r := config.Load(config.Source{File: file})
		if _, ok := r.Config.Driver(driver); ok || slices.Contains(r.Faulty, driver) {
			return file, nil
		}
	}
	return "", err
}
