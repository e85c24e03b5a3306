package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

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
	mounted := func(v volumes.Volume) bool { return !v.Unmounted() || mountAt(x.kubeletMounts, v.Target).Point != "" }
	staged, published, waiting := 0, 0, 0
	unmounted := map[string][]string{} // directories, by driver
	x.waiting = x.failedMounts(ctx)
	for _, v := range x.volumes {
		own := func(w podWait) bool {
			inline := w.driver == "" && w.handle == v.Pod+"-"+path.Base(v.Dir)
			return w.pod == v.Pod && (inline || w.driver == v.Driver && w.handle == v.Handle)
		}
		i := slices.IndexFunc(x.waiting, own)
		if i >= 0 {
			x.waiting[i].driver, x.waiting[i].mounted = v.Driver, mounted(v)
		}
		// The kubelet starts a container when it has mounted the pod's volumes, and ends it before
		// it unmounts them.
		runs := slices.ContainsFunc(x.inPods, func(m podMount) bool { return strings.Contains(m.Root, "/pods/"+v.Pod+"/containers/") })
		switch age := time.Since(v.Changed).Abs(); {
		case v.Pod == "":
			staged++
		case mounted(v):
			published++
		case age >= settling, age >= kubeletRound && runs:
			unmounted[v.Driver] = append(unmounted[v.Driver], safetext.Word(v.Dir))
		default:
			waiting++
			if late := time.Since(v.Since).Abs(); i < 0 && late >= volumes.Slow {
				text := fmt.Sprintf("%s, for %v, NodePublishVolume without an answer", safetext.Word(v.Pod), late.Round(time.Second))
				x.waiting = append(x.waiting, podWait{pod: v.Pod, driver: v.Driver, text: text})
			}
		}
	}
	x.waiting = slices.DeleteFunc(x.waiting, func(w podWait) bool { return w.unmount != w.mounted })
	x.checked("", "volumes", OK, "%d mounted for pods, %d not yet, %d staged", published, waiting, staged)
	for _, d := range sortedKeys(unmounted) {
		if x.selected(d) && csiname.CheckName(d) == nil {
			dirs := safetext.Some(unmounted[d], 5)
			x.finding(d, "volumes", "volume-not-mounted", "published, and nothing is mounted there: "+dirs+": the kubelet does not check again while it runs",
				"a mount, unless this driver publishes without one",
				note("the kubelet, restarted, publishes again what a pod still uses, and unpublishes the rest"), x.kubelet.restart())
		}
	}
	x.waitingForOthers()
	x.notStarted(ctx)
}

// podWait is a pod that waits for a volume to be mounted or, with unmount, unmounted.
type podWait struct {
	pod, driver, handle string // no driver: an inline volume, or not known; no pod: a staged volume
	pv                  string // empty: none, or not known
	text                string
	at                  time.Time // of the kubelet's error; zero: a call that has not ended
	unmount, mounted    bool
}

// Errors of the kubelet about volumes (kubelet v1.37): of one operation, whose volume has the pod
// and its own name in place of a driver if it is inline, and of a pod that waited for 2 minutes.
var (
	failedOperation = regexp.MustCompile(`Error: (.*?) for volume \\*"([^\\"]*)\\*" \(UniqueName: \\*"kubernetes\.io/([\w-]+)/(?:([^\\"^]+)\^)?([^\\"]*)\\*"\) ` +
		`(?:pod \\*"([^\\"]+)\\*" \(UID: \\*"([\w-]+)\\*"\)|on node \S+)[ :]*(.*)`)
	failedPod = regexp.MustCompile(`(unmounted volumes=.*?)\\*" pod=\\*"([^\\"]+)\\*" podUID=\\*"([\w-]+)\\*"`)
	klogTime  = regexp.MustCompile(`\b[EF]([0-9]{4} [0-9:]{8})\.`)
)

// calls are the calls to a driver, by the operation of the kubelet.
var calls = map[string]string{"MountVolume.MountDevice failed": "NodeStageVolume", "MapVolume.SetUpDevice failed": "NodeStageVolume",
	"MountVolume.SetUp failed": "NodePublishVolume", "MapVolume.MapPodDevice failed": "NodePublishVolume",
	"UnmountVolume.TearDown failed": "NodeUnpublishVolume", "UnmapVolume.UnmapPodDevice failed": "NodeUnpublishVolume",
	"UnmountDevice failed": "NodeUnstageVolume", "UnmapDevice.TearDownDevice failed": "NodeUnstageVolume"}

// failedMounts returns the pods with a volume that the running kubelet could not mount or unmount
// in the last minutes, with its last error. It has no files about them: it removes those that it
// has written after each try.
func (x *diagnosis) failedMounts(ctx context.Context) (all []podWait) {
	if x.kubelet == nil {
		return nil
	}
	for _, line := range x.kubeletErrors(ctx, 5*time.Minute, "UniqueName: |unmounted volumes=") {
		var w podWait
		pod, why := "", ""
		if m := failedOperation.FindStringSubmatch(line); m != nil {
			call := calls[m[1]]
			if !strings.Contains(m[8], "rpc error: ") {
				call = ""
			} else if m[5] == m[7]+"-"+m[2] {
				call += " of an inline volume"
			}
			pod, why = cmp.Or(m[6], "volume"), cmp.Or(call, m[1])+": "+strings.TrimSuffix(m[8], `"`)
			w = podWait{pod: m[7], driver: m[4], handle: m[5], pv: m[2], unmount: strings.HasPrefix(m[1], "Un") || m[7] == ""}
			if m[3] != "csi" {
				w.driver = "kubernetes.io/" + m[3]
			}
		} else if m := failedPod.FindStringSubmatch(line); m != nil {
			pod, why, w.pod = m[2], m[1], m[3]
		}
		dir := filepath.Join(x.config.Config.Kubelet.RootDir, "pods", w.pod)
		_, gone := x.stat(ctx, dir)                                // or it cannot be made
		_, starts := x.stat(ctx, filepath.Join(dir, "containers")) // the pod's volumes are mounted
		known := func(o podWait) bool { return o.pod == w.pod && (o.handle == w.handle || w.handle == "") }
		ofCSI := w.handle != "" && !strings.Contains(w.driver, "/")
		if pod == "" || gone != nil && !strings.Contains(why, dir) || !ofCSI && starts == nil || slices.ContainsFunc(all, known) {
			continue
		}
		if at := klogTime.FindStringSubmatch(line); at != nil {
			w.at, _ = time.ParseInLocation("20060102 15:04:05", strconv.Itoa(time.Now().Year())+at[1], time.Local)
		}
		w.text = fmt.Sprintf("%s (%s), %s", safetext.Word(pod), safetext.Word(cmp.Or(w.pod, w.handle)), safetext.Quote(why))
		// The reason why a pod waited says more than that it did.
		all = append(slices.DeleteFunc(all, func(o podWait) bool { return o.pod == w.pod && o.handle == "" }), w)
	}
	return all
}

// waitingForOthers finds the drivers for which pods wait, and reports pods that wait for none that
// has an enabled table.
func (x *diagnosis) waitingForOthers() {
	enabled := x.enabledDrivers()
	others := map[string][]podWait{}
	for i := range x.waiting {
		w := &x.waiting[i]
		named := slices.IndexFunc(enabled, func(name string) bool { return strings.Contains(w.text, name) })
		switch {
		case w.driver == "" && named >= 0:
			w.driver = enabled[named]
		// The pod can also wait for a volume of a driver that is not here.
		case w.driver == "" && len(enabled) == 1 && (w.handle != "" || !strings.Contains(w.text, "context deadline exceeded")):
			w.driver = enabled[0]
		}
		if csiname.CheckName(w.driver) != nil {
			w.driver = ""
		}
		if !slices.Contains(enabled, w.driver) && x.selected(w.driver) {
			others[w.driver] = append(others[w.driver], *w)
		}
	}
	for _, name := range sortedKeys(others) {
		x.podsWait(name, others[name], "", []Fix{x.volumeLog()})
	}
}

// podsWait reports pods that wait for volumes of a driver. The lines of fix are about the driver,
// for errors that no object of Kubernetes explains.
func (x *diagnosis) podsWait(driver string, all []podWait, set string, fix []Fix) {
	var texts []string
	var objects []Fix
	byDriver := false
	for _, w := range all {
		texts = append(texts, w.text)
		o := x.object(w)
		byDriver = byDriver || o == nil || strings.Contains(w.text, "rpc error: ") || strings.Contains(w.text, "deadline exceeded")
		if len(objects) < 10 && !strings.Contains(fmt.Sprint(objects), strings.Trim(fmt.Sprint(o), "[]")) {
			objects = append(objects, o...)
		}
	}
	slices.Sort(texts)
	waits := safetext.Some(texts, 5)
	if strings.Contains(waits, "no space left") {
		fix = append([]Fix{note("make room on the file system that the error names"), run("df", "-h")}, fix...)
	}
	if !byDriver {
		fix, set = nil, ""
	}
	x.finding(driver, "volumes", "pods-waiting", "pods wait for a volume: "+waits+set, "it is mounted within a minute", append(objects, fix...)...)
}

// causes are errors of the kubelet (v1.37), or of a driver, about objects of Kubernetes: what must
// be right, and how to see it. NAME matches a name; DRIVER, PV, NODE and UID are those of the pod.
var causes = []struct{ pattern, right, show string }{
	{`find the secret NAME in the namespace NAME with`, "create the Secret, or the PersistentVolume again, with the right name, which the StorageClass also has", "get -n $2 secret/$1 pv/PV"},
	{`processing PVC NAME/NAME: .*PV (?:object )?NAME `, "the PersistentVolume must exist, and its claimRef be this claim, with its UID", "get -n $1 pvc/$2 pv/$3 -o yaml"},
	{`processing PVC NAME/NAME: `, "the claim must exist, be bound, and not be deleted", "describe -n $1 pvc/$2"},
	{`NodeAffinity check failed`, "nodeAffinity of the PersistentVolume must match the labels of this Node, or the pod belongs on another one", "describe pv/PV node/NODE"},
	{`ReadWriteOncePod`, "the other pod that has the volume must end first, or the PersistentVolume have another access mode", "get pods -A --field-selector spec.nodeName=NODE"},
	{`driver name NAME not found`, "the PersistentVolume must name a driver that is registered on this node, see csi-registrar status", "get pv/PV -o yaml"},
	{`olume attachment|VolumeAttachment|volumeattachments|not attached|external-attacher|in node's status`,
		"attachRequired of the CSIDriver must be false, for which it is deleted and created again, unless an external-attacher runs, whose log says more", "get csidriver/DRIVER volumeattachments -o yaml"},
	{`volume mode|lifecycle mode|f?[sS]Group|accoount token`,
		"volumeLifecycleModes, fsGroupPolicy and tokenRequests of the CSIDriver must be those of the driver", "get csidriver/DRIVER -o yaml"},
	{`([a-z]+(?:\.[a-z0-9.]+)?) \\*"NAME\\*" (?:not found|is forbidden)`, "the object must exist, and the Node be allowed to read it", "get $1 -A --field-selector metadata.name=$2"},
	{`an inline volume: rpc error: code = (?:NotFound|Inv|Failed|Unimpl|Perm|Unauth)`, "the CSIDriver must have podInfoOnMount: true, if the driver needs it, and the pod the right volumeAttributes",
		"get csidriver/DRIVER -o yaml"},
	{`rpc error: code = (?:NotFound|Inv|Failed|Unimpl|Perm|Unauth|OutOf)|rpc error: .*(?:option|fs ?type)`,
		"the PersistentVolume must have the right volumeHandle, volumeAttributes, mountOptions, fsType and accessModes, and the CSIDriver podInfoOnMount and tokenRequests, if the driver needs them",
		"get pv/PV csidriver/DRIVER -o yaml"},
	{`unmounted volumes=`, "the PersistentVolume of each claim must name a driver that is registered on this node; else it is created again", volumesOfClaims},
}

// volumesOfClaims shows which driver each PersistentVolume names.
const volumesOfClaims = "get pv -o custom-columns=name:.metadata.name,namespace:.spec.claimRef.namespace,claim:.spec.claimRef.name,driver:.spec.csi.driver"

// object shows the object of Kubernetes that an error is about; nil if there is none.
func (x *diagnosis) object(w podWait) []Fix {
	for _, c := range causes {
		pattern := regexp.MustCompile(strings.ReplaceAll(c.pattern, "NAME", `([a-z0-9][a-z0-9.-]*)`))
		m := pattern.FindStringSubmatchIndex(w.text)
		if m == nil {
			continue
		}
		show := c.show
		if isNodeName(w.pv) {
			show = strings.Replace(show, "PV", w.pv, 1)
		}
		show = strings.TrimSuffix(show, " pv/PV") // an inline volume
		show = strings.NewReplacer("DRIVER", cmp.Or(w.driver, "DRIVER"), "NODE", x.nodeName(), "UID", w.pod).Replace(show)
		command := strings.Fields(string(pattern.ExpandString(nil, show, w.text, m)))
		return []Fix{note("with kubectl: %s", c.right), optional(run("kubectl", command...))}
	}
	return nil
}

// volumeLog shows what the kubelet logs about volumes.
func (x *diagnosis) volumeLog() Fix {
	return run("journalctl", "--no-pager", "-b", "-u", x.kubelet.service(), "-n", "20", "--grep", "kubernetes.io/csi")
}

// logs returns the commands that show what the kubelet and the driver log about volumes, and the
// calls between them.
func (x *diagnosis) logs(d config.Driver, server server) []Fix {
	trace := path.Join(path.Dir(d.Socket), "trace.sock")
	return slices.Concat([]Fix{x.volumeLog()}, server.log(),
		[]Fix{note("for all calls, with endpoint = %s in the table of the driver, see trace.md:", safetext.ShellWord(trace)), optional(run("csi-registrar", "trace", "--listen", trace, "--connect", d.Socket))})
}

// stuckVolumes returns how many volumes the kubelet cannot unmount while no driver is registered,
// as the rest of a sentence; empty if there are none.
func (x *diagnosis) stuckVolumes() string {
	n := 0
	for _, name := range x.enabledDrivers() {
		n += x.volumesOf(name)
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("; %s in use, which the kubelet cannot unmount while the driver is not registered", safetext.Count(n, "volume"))
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
