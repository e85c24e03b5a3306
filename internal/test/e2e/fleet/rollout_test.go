package fleet_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/node"
	"csi-registrar/internal/test/e2e/ociimage"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

func TestMain(m *testing.M) {
	// The controller logs each pod that it creates.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	built.Main(m)
}

const (
	suite    = "bookworm"
	driver   = "hostpath.csi.k8s.io"
	socket   = "/var/lib/kubelet/plugins/csi-hostpath/csi.sock"
	registry = "registry.example/sig-storage/"
	// The sidecar's images.
	ndr         = registry + "csi-node-driver-registrar:v2.18.0"
	sidecarMode = registry + "csi-registrar:0.1.0"

	// The kubelet acts in a loop of one second.
	quiet = 2500 * time.Millisecond
	// A driver that serves may be missing for so long, and for so long where the pod was restarted
	// beside node-driver-registrar within the hour.
	maxMissing, maxMissingBesideNDR = 2 * time.Second, 5 * time.Second
)

// TestRolloutWithPods takes three booted nodes, each with its kubelet, through ways A and B of
// rollout.md: one after the other, the third one from an image without csi-registrar, one on its
// way back, all forward, and all without csi-registrar again. Each node has a pod that writes to a
// volume all the time, and in each step gets a new one, at the moment at which the driver is
// missing. It prints what each step cost. With DRIVERS=DIR the programs csi-node-driver-registrar
// and hostpathplugin in DIR are used.
func TestRolloutWithPods(t *testing.T) {
	nspawn.Root(t, suite+"-node") // skips without root on Debian
	t.Run("A", func(t *testing.T) {
		t.Parallel()
		r := newRollout(t)
		n1, n2 := r.join("n1"), r.join("n2")
		r.step("pod restarted, node-driver-registrar", 2, func() { r.restartPods(n1) }, n1)
		r.step("the sidecar becomes csi-registrar: rolling update", 2, func() { r.update(sidecarMode) }, n1, n2)
		r.step("installed", 2, func() { r.install(n1) }, n1)
		r.step("pod restarted", 0, func() { r.restartPods(n1) }, n1)
		var n3 *rolloutNode
		r.step("a node of an old image joins", 0, func() { n3 = r.join("n3") })
		r.step("installed", 2, func() { r.install(n2) }, n2)
		r.step("back: removed", 2, func() { r.uninstall(n1) }, n1)
		r.step("installed again", 2, func() { r.install(n1) }, n1)
		r.step("node of an old image: installed", 2, func() { r.install(n3) }, n3)
		r.step("uninstalled", 2, func() { r.uninstall(r.nodes...) }, n1, n2, n3)
	})
	t.Run("B", func(t *testing.T) {
		t.Parallel()
		r := newRollout(t)
		r.usePolicy()
		n1, n2 := r.join("n1"), r.join("n2")
		r.step("installed beside the sidecar", 0, func() { r.install(n1); r.install(n2) })
		r.step("listed, pod restarted", 2, func() { r.listNodes(true, n1) }, n1)
		r.step("pod restarted", 0, func() { r.restartPods(n1) })
		var n3 *rolloutNode
		r.step("a node of an old image joins", 0, func() { n3 = r.join("n3") })
		r.step("listed, pod restarted", 2, func() { r.listNodes(true, n2) }, n2)
		r.step("made again by an operator", 2, func() { r.recreateDaemonSet(); r.podsReady() }, n3)
		r.step("back: not listed, pod restarted", 2, func() { r.listNodes(false, n1) }, n1)
		r.step("pod restarted beside csi-registrar", 2, func() { r.restartPods(n1) }, n1)
		r.step("listed again, pod restarted", 2, func() { r.listNodes(true, n1) }, n1)
		r.step("node of an old image: installed", 0, func() { r.install(n3) })
		r.step("node of an old image: listed, pod restarted", 2, func() { r.listNodes(true, n3) }, n3)
		r.step("back: not listed, pods restarted", 2, func() { r.listNodes(false, r.nodes...) }, r.nodes...)
		r.step("uninstalled", 0, func() { r.uninstall(r.nodes...) })
	})
}

// TestOperator makes the DaemonSet with the sidecar again every few seconds, as an operator can do
// every minute, under the policy of way B: the daemon has registered the driver all the time.
func TestOperator(t *testing.T) {
	nspawn.Root(t, suite+"-node") // skips without root on Debian
	t.Parallel()
	r := newRollout(t)
	r.usePolicy()
	n := r.join("n1")
	r.install(n)
	r.step("listed, pod restarted", 2, func() { r.listNodes(true, n) }, n)
	r.step("made again by an operator, ten times", 0, func() {
		stop := make(chan struct{})
		looks := 0
		var looking sync.WaitGroup
		looking.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(100 * time.Millisecond):
				}
				looks++
				if err := r.registered(n); err != nil {
					t.Errorf("look %d: %v", looks, err)
				}
			}
		})
		every := time.NewTicker(2 * time.Second)
		defer every.Stop()
		for range 10 {
			<-every.C
			r.recreateDaemonSet()
		}
		r.podsReady()
		close(stop)
		looking.Wait()
		t.Logf("it was registered at each of %d looks", looks)
	})
}

// rollout is a cluster that changes node by node.
type rollout struct {
	*cluster
	set    *appsv1.DaemonSet
	nodes  []*rolloutNode
	images map[string]string // archives, by file name
	failed failures
	table  strings.Builder
}

func newRollout(t *testing.T) *rollout {
	r := &rollout{cluster: start(t), images: images(t)}
	for _, object := range decode(t, read(t, "packaging/examples/hostpath/daemonset.yaml")) {
		if set, ok := object.(*appsv1.DaemonSet); ok {
			r.set = set
		}
	}
	pod := &r.set.Spec.Template.Spec
	pod.HostNetwork = true // the nodes have no other
	pod.Containers = append(pod.Containers, corev1.Container{
		Name: "node-driver-registrar", Image: ndr,
		Args:         []string{"--csi-address=/csi/csi.sock", "--kubelet-registration-path=" + socket},
		VolumeMounts: []corev1.VolumeMount{{Name: "socket", MountPath: "/csi"}, {Name: "registration", MountPath: "/registration"}},
	})
	kind := corev1.HostPathDirectoryOrCreate
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "registration", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: node.Registry, Type: &kind},
	}})
	r.create(r.set.DeepCopy())
	r.failed.watch(t, r.cluster)
	fmt.Fprint(&r.table, "\n| | node | CSINode writes | missing, s | of that while the driver serves, s | a new pod waits, s | pods that failed |\n"+
		"|---|---|---|---|---|---|---|\n")
	t.Cleanup(func() { t.Log(r.table.String()) })
	return r
}

// images returns the archives of the images of the DaemonSet.
func images(t *testing.T) map[string]string {
	t.Helper()
	busybox := filepath.Join(nspawn.Root(t, suite+"-node"), "bin/busybox")
	hostpath := ociimage.Image{
		Names: []string{registry + "hostpathplugin:v1.17.1"}, Entrypoint: []string{"/hostpathplugin"},
		Files: map[string]string{"hostpathplugin": built.Command(t, "upstream"), "usr/bin/csi-sample-driver": built.SampleDriver(t), "bin/busybox": busybox},
		Links: ociimage.Applets([]string{"mount", "umount"}),
	}
	sidecar := ociimage.Image{
		Names: []string{ndr}, Entrypoint: []string{"/csi-node-driver-registrar"},
		Files: map[string]string{"bin/faulty": built.Command(t, "faulty"), "bin/busybox": busybox},
		Links: ociimage.Applets([]string{"sh", "sleep"}),
	}
	if dir := os.Getenv("DRIVERS"); dir != "" {
		hostpath.Files["hostpathplugin"] = filepath.Join(dir, "hostpathplugin")
		sidecar.Files["csi-node-driver-registrar"] = filepath.Join(dir, "csi-node-driver-registrar")
	} else {
		file := filepath.Join(t.TempDir(), "sidecar")
		sidecar.Files["csi-node-driver-registrar"] = file
		if err := os.WriteFile(file, fmt.Appendf(nil, `#!/bin/sh
trap exit TERM
until [ -S /csi/csi.sock ]; do sleep 0.05; done
exec faulty registrar --socket /registration/%s-reg.sock --name %[1]s --endpoint %s
`, driver, socket), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return map[string]string{
		"driver": string(hostpath.Tar(t)), "sidecar": string(sidecar.Tar(t)),
		// As in packaging/examples/cluster/Containerfile.
		"registrar": string(ociimage.Image{
			Names: []string{sidecarMode}, Entrypoint: []string{"/csi-registrar", "run"},
			Files: map[string]string{"csi-registrar": built.Registrar(t)},
		}.Tar(t)),
	}
}

// rolloutNode is a node with a kubelet, the driver's pod and a pod that writes.
type rolloutNode struct {
	*node.Node
	name              string
	writes            *node.Writes
	served            outages
	installed, listed bool
	yielded           bool // its registrar has changed before
}

// join adds a node that has no csi-registrar yet.
func (r *rollout) join(name string) *rolloutNode {
	r.t.Helper()
	n := &rolloutNode{Node: node.Join(r.t, suite, r.ControlPlane, name, 10250+len(r.nodes)), name: name}
	unit := "[Service]\n"
	for file, archive := range r.images {
		n.Write("/opt/"+file+".tar", archive)
		unit += "ExecStart=/usr/bin/ctr -n k8s.io image import --snapshotter native /opt/" + file + ".tar\n"
	}
	n.Write("/etc/systemd/system/image.service.d/driver.conf", unit)
	n.writes = n.WatchWritesOf(r.t, driver)
	n.Boot()
	r.nodes = append(r.nodes, n)
	r.podsReady()
	r.eventually(name+": the driver to be registered", func() error { return r.registered(n) })
	n.served.watch(r.t, n.Path(socket))
	for _, pod := range []string{"steady-" + name, "new-" + name} {
		n.CreateVolumeOf(driver, socket, pod)
	}
	r.must(r.createWriter(n, "steady-"))
	n.Running("steady-" + name)
	return n
}

// createWriter creates a pod that writes to the volume of the same name.
func (r *rollout) createWriter(n *rolloutNode, prefix string) error {
	pod := node.Writer(prefix+n.name, prefix+n.name)
	pod.Spec.NodeName = n.name
	_, err := r.API.CoreV1().Pods(pod.Namespace).Create(r.t.Context(), pod, metav1.CreateOptions{})
	return err
}

// install installs package and drop-in.
func (r *rollout) install(n *rolloutNode) {
	r.t.Helper()
	n.Write("/etc/csi-registrar/conf.d/60-hostpath.toml", read(r.t, "packaging/examples/hostpath/60-hostpath.toml"))
	n.Install("0.1.99", "csi-registrar")
	n.installed = true
}

// uninstall removes the package.
func (r *rollout) uninstall(nodes ...*rolloutNode) {
	r.t.Helper()
	for _, n := range nodes {
		n.Run("dpkg", "--remove", "csi-registrar")
		n.installed = false
	}
}

// restartPods deletes the driver's pods of some nodes and waits for the next ones.
func (r *rollout) restartPods(nodes ...*rolloutNode) {
	r.t.Helper()
	var old []types.UID
	for _, n := range nodes {
		on := metav1.ListOptions{LabelSelector: r.selector(), FieldSelector: "spec.nodeName=" + n.name}
		pods := r.API.CoreV1().Pods(namespace)
		list, err := pods.List(r.t.Context(), on)
		r.must(err)
		for _, pod := range list.Items {
			old = append(old, pod.UID)
		}
		r.must(pods.DeleteCollection(r.t.Context(), metav1.DeleteOptions{}, on))
	}
	r.podsReady(old...)
}

// listNodes puts nodes into the list of the policy or takes them out, and restarts their pods.
func (r *rollout) listNodes(listed bool, nodes ...*rolloutNode) {
	r.t.Helper()
	for _, n := range nodes {
		n.listed = listed
		r.list(n.name, listed)
	}
	r.restartPods(nodes...)
}

// update changes the sidecar's image.
func (r *rollout) update(image string) {
	r.t.Helper()
	sidecar := &r.set.Spec.Template.Spec.Containers[1]
	sidecar.Image = image
	patch := fmt.Appendf(nil, `{"spec":{"template":{"spec":{"containers":[{"name":%q,"image":%q}]}}}}`, sidecar.Name, image)
	_, err := r.API.AppsV1().DaemonSets(namespace).Patch(r.t.Context(), r.set.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	r.must(err)
	r.podsReady()
}

// recreateDaemonSet deletes the DaemonSet with its pods, as the garbage collector does, and creates
// it again.
func (r *rollout) recreateDaemonSet() {
	r.t.Helper()
	r.must(r.API.AppsV1().DaemonSets(namespace).Delete(r.t.Context(), r.set.Name, metav1.DeleteOptions{}))
	r.must(r.API.CoreV1().Pods(namespace).DeleteCollection(r.t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: r.selector()}))
	r.eventually("the pods to be gone", func() error {
		list, err := r.API.CoreV1().Pods(namespace).List(r.t.Context(), metav1.ListOptions{LabelSelector: r.selector()})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("there are %d", len(list.Items))
		}
		return err
	})
	r.create(r.set.DeepCopy())
}

func (r *rollout) selector() string { return metav1.FormatLabelSelector(r.set.Spec.Selector) }

// podsReady waits until each node has one pod of the DaemonSet, with the sidecar that it should
// have, which is ready and not one of the old ones.
func (r *rollout) podsReady(old ...types.UID) {
	r.t.Helper()
	r.eventually("the driver's pods to be ready", func() error {
		list, err := r.API.CoreV1().Pods(namespace).List(r.t.Context(), metav1.ListOptions{LabelSelector: r.selector()})
		if err != nil {
			return err
		}
		for _, pod := range list.Items {
			at := slices.IndexFunc(r.nodes, func(n *rolloutNode) bool { return n.name == pod.Spec.NodeName })
			ready := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			})
			if at < 0 || pod.DeletionTimestamp != nil || !ready || slices.Contains(old, pod.UID) {
				return fmt.Errorf("the pod on %q: %+v", pod.Spec.NodeName, pod.Status)
			}
			var want, got []string
			for _, c := range r.set.Spec.Template.Spec.Containers {
				if !r.nodes[at].listed || !isSidecar(c) {
					want = append(want, c.Image)
				}
			}
			for _, c := range pod.Spec.Containers {
				got = append(got, c.Image)
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("on %s it has %q, want %q", pod.Spec.NodeName, got, want)
			}
		}
		if len(list.Items) != len(r.nodes) {
			return fmt.Errorf("there are %d", len(list.Items))
		}
		return nil
	})
}

// registered reports what is missing until the driver is registered by the right registrar.
func (r *rollout) registered(n *rolloutNode) error {
	if !n.writes.HasDriver() {
		return errors.New("the CSINode does not have it")
	}
	if !n.installed {
		return nil
	}
	want := "registered"
	if !n.listed && r.set.Spec.Template.Spec.Containers[1].Image == ndr {
		want = "conflict"
	}
	var status struct {
		Drivers []struct{ Name, State, Reason string }
	}
	out, err := n.Try("csi-registrar", "status", "--json") // may exit 1
	if json.Unmarshal([]byte(out), &status) != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if len(status.Drivers) != 1 || status.Drivers[0].State != want {
		return fmt.Errorf("%+v, want %s", status.Drivers, want)
	}
	return nil
}

// step changes some nodes, and checks how often that wrote their CSINodes; those of other nodes are
// not written. On each node a pod is created when the driver goes missing, or before the change
// where it does not.
func (r *rollout) step(what string, writes int, change func(), changed ...*rolloutNode) {
	r.t.Helper()
	nodes := slices.Clone(r.nodes)
	began := time.Now()
	from := map[*rolloutNode]int{}
	done := make(chan struct{})
	var creating sync.WaitGroup
	for _, n := range nodes {
		from[n] = len(r.lines(n))
		if writes == 0 || !slices.Contains(changed, n) {
			r.must(r.createWriter(n, "new-"))
			continue
		}
		creating.Go(func() {
			for n.writes.HasDriver() {
				select {
				case <-done:
				case <-time.After(5 * time.Millisecond):
					continue
				}
				break
			}
			if err := r.createWriter(n, "new-"); err != nil {
				r.t.Error(err)
			}
		})
	}
	change()
	close(done)
	creating.Wait()
	waited := map[*rolloutNode]time.Duration{}
	for _, n := range nodes {
		pod := n.Running("new-" + n.name)
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady {
				waited[n] = c.LastTransitionTime.Sub(pod.CreationTimestamp.Time)
			}
		}
		r.eventually(what+": the driver to be registered on "+n.name, func() error { return r.registered(n) })
	}
	for _, n := range nodes {
		n.DeletePod("new-" + n.name)
	}
	// Wait, to see that nothing more happens.
	time.Sleep(quiet)
	failed := r.failed.take()
	for i, n := range nodes {
		want := 0
		if slices.Contains(changed, n) {
			want = writes
		}
		got := n.writes.Count("CSINode", began)
		missing, serving := n.missing(began)
		gap, err := node.LongestGap(r.lines(n)[max(0, from[n]-1):])
		if err != nil || gap > time.Second || len(r.lines(n)) <= from[n] {
			r.t.Errorf("%s on %s: the pod wrote nothing for %s, %v", what, n.name, gap, err)
		}
		failures := ""
		if i == 0 {
			failures = fmt.Sprint(len(failed))
		}
		fmt.Fprintf(&r.table, "| %s | %s | %d | %.1f | %.1f | %.0f | %s |\n", what, n.name, got, missing.Seconds(), serving.Seconds(), waited[n].Seconds(), failures)
		limit := maxMissing
		if n.yielded {
			limit = maxMissingBesideNDR
		}
		if err := r.registered(n); err != nil || got != want || (missing > 0) != (want > 0) || serving > limit {
			r.t.Errorf("%s on %s: %d writes of the CSINode, want %d; %s without the driver, %s of that while it served; %v", what, n.name, got, want, missing, serving, err)
		}
		n.yielded = n.yielded || want > 0 && n.installed
	}
	if len(failed) > 0 {
		r.t.Errorf("%s: pods failed: %q", what, failed)
	}
}

// lines returns what the pod of a node has written.
func (r *rollout) lines(n *rolloutNode) []string {
	r.t.Helper()
	name := "steady-" + n.name
	lines := strings.Split(n.Read(fmt.Sprintf("/var/lib/kubelet/pods/%s/volumes/kubernetes.io~csi/%s/mount/%s", n.Pod(name).UID, name, node.WriterFile)), "\n")
	return lines[:len(lines)-1] // the last one is empty or incomplete
}

// missing returns for how long the CSINode did not have the driver, which it had before, and for
// how long of that the driver served.
func (n *rolloutNode) missing(since time.Time) (all, serving time.Duration) {
	has, from := true, since
	add := func(to time.Time) {
		if !has {
			all += to.Sub(from)
			serving += to.Sub(from) - n.served.between(from, to)
		}
		from = to
	}
	for _, w := range n.writes.Since(since) {
		if w.Kind == "CSINode" {
			add(w.At)
			has = w.HasDriver
		}
	}
	add(time.Now())
	return all, serving
}

// outages are the times at which nothing listens at a driver's socket.
type outages struct {
	mu  sync.Mutex
	all [][2]time.Time
}

// watch watches until the test ends.
func (o *outages) watch(t *testing.T, path string) {
	ctx := t.Context()
	var done sync.WaitGroup
	t.Cleanup(done.Wait)
	done.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		last := time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			c, err := net.Dial("unix", path)
			now := time.Now()
			if err == nil {
				c.Close()
			} else {
				o.mu.Lock()
				o.all = append(o.all, [2]time.Time{last, now})
				o.mu.Unlock()
			}
			last = now
		}
	})
}

// between returns how long they were within a time.
func (o *outages) between(from, to time.Time) (sum time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, out := range o.all {
		begin, end := out[0], out[1]
		if begin.Before(from) {
			begin = from
		}
		if end.After(to) {
			end = to
		}
		sum += max(0, end.Sub(begin))
	}
	return sum
}

// failures are the pods that failed, with the reasons: pods that wait and then run did not.
type failures struct {
	mu      sync.Mutex
	all     map[string]string
	counted map[string]bool
}

// watch watches all pods until the test ends.
func (f *failures) watch(t *testing.T, c *cluster) {
	f.all, f.counted = map[string]string{}, map[string]bool{}
	shared := informers.NewSharedInformerFactory(c.API, 0)
	_, err := shared.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: f.look, UpdateFunc: func(_, pod any) { f.look(pod) },
	})
	c.must(err)
	stop := make(chan struct{})
	shared.Start(stop)
	t.Cleanup(func() { close(stop); shared.Shutdown() })
}

func (f *failures) look(object any) {
	pod := object.(*corev1.Pod)
	why := ""
	if pod.Status.Phase == corev1.PodFailed {
		why = "it is " + pod.Status.Reason + " " + pod.Status.Message
	}
	for _, c := range pod.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" {
			why = c.Name + " waits: " + w.Reason
		}
		if c.RestartCount > 0 {
			why = fmt.Sprintf("%s was restarted: %+v", c.Name, c.LastTerminationState)
		}
	}
	// The programs of a pod that is deleted end as they like.
	if why != "" && pod.DeletionTimestamp == nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		if key := pod.Name + " " + string(pod.UID); !f.counted[key] {
			f.all[key] = why
		}
	}
}

// take returns those since the last call.
func (f *failures) take() (all []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pod, why := range f.all {
		all = append(all, pod+": "+why)
		f.counted[pod] = true
	}
	clear(f.all)
	return all
}
