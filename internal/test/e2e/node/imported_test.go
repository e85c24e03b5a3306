package node_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/node"
	"csi-registrar/internal/test/e2e/ociimage"
)

// imported are manifests in internal/tool/importer/testdata, each modeled on one of a real driver.
var imported = []string{"nfs", "smb", "hostpath", "ebs", "lvm", "hcloud", "cleanup", "open-local", "three", "longhorn"}

// importedImage is the prefix of the names of images. The image without a real driver has the
// programs that replace a driver, its registrar and other sidecars.
const importedImage = "localhost/csi-e2e/driver"

// TestImportedDaemonSets replaces the sidecars of ten drivers as `import` says, with the drop-ins
// and changed manifests in the tests of internal/tool/importer, on a node without earlier files of
// these drivers. The drivers are replaced by fakes that do not create the directory of their
// socket, except those whose program is in $DRIVERS, a directory, under the name of its image (such
// as nfsplugin): these run with the arguments of their manifest. So does csi-node-driver-registrar.
//
// MANIFESTS=DIR uses the manifests DIR/NAME.yaml instead, each with the files NAME.toml and
// NAME.after that TestImport of internal/tool/importer writes for them with the flag -update.
func TestImportedDaemonSets(t *testing.T) {
	t.Parallel()
	n := node.New(t, "trixie")
	n.Install("0.1.99", "csi-registrar")
	n.Boot()
	image := ociimage.Image{
		Files: map[string]string{
			"bin/pod": built.Command(t, "pod"), "bin/busybox": n.Path("/bin/busybox"),
			"bin/csi-sample-driver": built.SampleDriver(t), "bin/csi-registrar": built.Registrar(t),
		},
		Links: ociimage.Applets([]string{"sh", "rm"}),
	}
	importImage := func(name string, files map[string]string) {
		image := image
		image.Names, image.Files = []string{name}, maps.Clone(image.Files)
		maps.Copy(image.Files, files)
		n.Write("/opt/driver.tar", string(image.Tar(t)))
		n.Run("ctr", "-n", "k8s.io", "image", "import", "--snapshotter", "native", "/opt/driver.tar")
	}
	importImage(importedImage+":1", nil)
	real := realDrivers(t)
	for name, files := range real {
		importImage(importedImage+"-"+name+":1", files)
	}

	sockets := map[string]string{} // by driver
	var before, after []*corev1.Pod
	dir, names := importedManifests(t)
	for _, name := range names {
		file := filepath.Join(dir, name)
		own := map[string]string{}
		for _, m := range table.FindAllStringSubmatch(read(t, file+".toml"), -1) {
			own[m[1]] = m[2]
		}
		maps.Copy(sockets, own)
		objects := manifestObjects(t, file+".yaml")
		createConfiguration(t, n, objects)
		changed := importedPods(t, manifestObjects(t, file+".after"), own, real)
		unchanged := importedPods(t, objects, own, real)
		for _, pod := range changed {
			i := slices.IndexFunc(unchanged, func(p *corev1.Pod) bool { return p.Name == pod.Name })
			if i < 0 {
				t.Fatalf("%s.yaml does not have %s", name, pod.Name)
			}
			before = append(before, unchanged[i])
		}
		after = append(after, changed...)
	}
	if len(after) != len(names) || len(sockets) < len(names) {
		t.Fatalf("%d manifests with %d pods and %d drivers", len(names), len(after), len(sockets))
	}

	// With the sidecars, then with the sidecars and the drop-ins.
	for _, pod := range before {
		n.CreatePod(pod)
	}
	awaitCSINode(n, sockets)
	awaitRunning(t, n, before)
	for _, name := range names {
		n.Write("/etc/csi-registrar/conf.d/60-"+name+".toml", read(t, filepath.Join(dir, name+".toml")))
	}
	state := "registered" // `run` as the sidecar yields to the daemon
	if real["csi-node-driver-registrar"] != nil {
		state = "conflict"
	}
	awaitStates(n, state, sockets)

	for _, pod := range before {
		n.DeletePod(pod.Name)
	}
	for _, socket := range sockets {
		n.Run("rm", "-rf", path.Dir(socket))
	}
	for _, pod := range after {
		n.CreatePod(pod)
	}
	awaitStates(n, "registered", sockets)
	for _, d := range awaitCSINode(n, sockets) {
		t.Logf("registered %s, node id %s, topology keys %q", d.Name, d.NodeID, d.TopologyKeys)
	}
	awaitRunning(t, n, after)

	// A rollout changes no registration, even if the pod removes the socket in its preStop hook.
	writes := n.WatchWrites(t)
	n.Eventually(time.Minute, "the CSINode to be watched", func() error {
		if writes.Count("CSINode", time.Time{}) == 0 {
			return fmt.Errorf("nothing was seen")
		}
		return nil
	})
	mark := time.Now()
	for _, pod := range after {
		n.DeletePod(pod.Name)
		n.CreatePod(pod)
		n.Running(pod.Name)
	}
	awaitStates(n, "registered", sockets)
	awaitRunning(t, n, after)
	if count := writes.Count("CSINode", mark); count != 0 {
		t.Errorf("the rollout wrote the CSINode %d times", count)
	}
	if mounts := n.Run("cat", "/proc/self/mounts"); strings.Contains(mounts, "/var/lib/kubelet/plugins/") {
		t.Errorf("a mount of a pod is left on the node:\n%s", mounts)
	}
}

// importedManifests returns a directory and the names of the manifests in it.
func importedManifests(t *testing.T) (dir string, names []string) {
	t.Helper()
	if dir = os.Getenv("MANIFESTS"); dir == "" {
		return filepath.Join(built.Root(t), "internal", "tool", "importer", "testdata", "good"), imported
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.after"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s has %d files .after, %v", dir, len(files), err)
	}
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".after"))
	}
	return dir, names
}

// realDrivers returns the files for the image of each driver in $DRIVERS, by path in the image. A
// driver is a program, or a directory of that name with its program and what that needs.
func realDrivers(t *testing.T) map[string]map[string]string {
	t.Helper()
	drivers := map[string]map[string]string{}
	dir := os.Getenv("DRIVERS")
	if dir == "" {
		return drivers
	}
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, file)
		name, _, _ := strings.Cut(rel, "/")
		if drivers[name] == nil {
			drivers[name] = map[string]string{}
		}
		drivers[name]["bin/"+filepath.Base(file)] = file
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return drivers
}

// table is a driver's table in a drop-in.
var table = regexp.MustCompile(`\[driver\."(.*)"\]\nsocket = "(.*)"`)

// manifestObjects returns the objects of a manifest whose kind is known.
func manifestObjects(t *testing.T, file string) (objects []runtime.Object) {
	t.Helper()
	documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(read(t, file))))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
		switch list, isList := object.(*corev1.List); {
		// a custom resource, or a comment
		case runtime.IsNotRegisteredError(err) || runtime.IsMissingKind(err):
		case err != nil:
			t.Fatalf("%s: %v", file, err)
		case isList:
			for _, item := range list.Items {
				object, _, err := scheme.Codecs.UniversalDeserializer().Decode(item.Raw, nil, nil)
				if err != nil {
					t.Fatalf("%s: %v", file, err)
				}
				objects = append(objects, object)
			}
		default:
			objects = append(objects, object)
		}
	}
}

// createConfiguration creates what pods mount in their namespace.
func createConfiguration(t *testing.T, n *node.Node, objects []runtime.Object) {
	t.Helper()
	api := n.Cluster.API.CoreV1()
	for _, object := range objects {
		var err error
		switch o := object.(type) {
		case *corev1.ConfigMap:
			o.Namespace = metav1.NamespaceDefault
			_, err = api.ConfigMaps(o.Namespace).Create(context.Background(), o, metav1.CreateOptions{})
		case *corev1.Secret:
			o.Namespace = metav1.NamespaceDefault
			_, err = api.Secrets(o.Namespace).Create(context.Background(), o, metav1.CreateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// importedPods returns the pods of the workloads for Linux.
func importedPods(t *testing.T, objects []runtime.Object, sockets map[string]string, real map[string]map[string]string) (pods []*corev1.Pod) {
	t.Helper()
	for _, object := range objects {
		var template corev1.PodTemplateSpec
		var name string
		switch w := object.(type) {
		case *appsv1.DaemonSet:
			name, template = w.Name, *w.Spec.Template.DeepCopy()
		case *appsv1.StatefulSet:
			name, template = w.Name, *w.Spec.Template.DeepCopy()
		default:
			continue
		}
		if template.Spec.NodeSelector["kubernetes.io/os"] != "windows" {
			pods = append(pods, importedPod(t, name, template.Spec, sockets, real))
		}
	}
	return pods
}

// importedPod puts programs into a pod: the real ones; for another registrar, `run` with its flags;
// in a pod without a real driver, fake drivers in the first container that sees each socket; and
// for all others a program that does nothing and does not end.
func importedPod(t *testing.T, name string, spec corev1.PodSpec, sockets map[string]string, real map[string]map[string]string) *corev1.Pod {
	t.Helper()
	yes, no, grace := true, false, int64(10)
	served := map[string]bool{}
	program := func(c corev1.Container) string { // the name of its image
		name, _, _ := strings.Cut(path.Base(c.Image), ":")
		return name
	}
	isRegistrar := func(c corev1.Container) bool {
		return slices.ContainsFunc(c.Args, func(arg string) bool { return strings.HasPrefix(arg, "--kubelet-registration-path") })
	}
	hasReal := slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return real[program(c)] != nil && !isRegistrar(c) })
	// the node has no other network
	spec.NodeName, spec.HostNetwork, spec.PriorityClassName = node.Name, true, ""
	spec.AutomountServiceAccountToken, spec.EnableServiceLinks, spec.TerminationGracePeriodSeconds = &no, &no, &grace
	for i := range spec.Containers {
		c := &spec.Containers[i]
		name := program(*c)
		c.Image, c.ImagePullPolicy = importedImage+":1", corev1.PullNever
		c.LivenessProbe, c.ReadinessProbe, c.StartupProbe, c.Ports, c.EnvFrom = nil, nil, nil, nil, nil
		c.SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		if isRegistrar(*c) {
			// on the node's network, several of them would listen on one port
			c.Args = slices.DeleteFunc(c.Args, func(arg string) bool { return strings.HasPrefix(arg, "--http-endpoint") })
			c.Command = []string{"/bin/csi-registrar", "run"}
		}
		if real[name] != nil {
			t.Logf("%s runs %s %q", c.Name, name, c.Args)
			c.Image, c.Command = importedImage+"-"+name+":1", []string{"/bin/" + name}
		}
		if isRegistrar(*c) || real[name] != nil {
			continue
		}
		var script []string
		for _, driver := range slices.Sorted(maps.Keys(sockets)) {
			if inside := pathInContainer(spec, c, sockets[driver]); inside != "" && !hasReal && !served[driver] && !strings.Contains(c.Name, "liveness") {
				served[driver] = true
				script = append(script, fmt.Sprintf("[ -d %s ] || exit 1; csi-sample-driver --name %s --socket %s --data /tmp/%[2]s & pids=\"$pids $!\"",
					path.Dir(inside), driver, inside))
			}
		}
		c.Command, c.Args = []string{"/bin/pod", "pause"}, nil
		if script != nil {
			c.Command = []string{"/bin/sh", "-c", strings.Join(script, "; ") + `; trap "kill $pids" TERM; wait $pids; wait $pids`}
		}
	}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault}, Spec: spec}
}

// awaitRunning waits until the pods are ready, none of whose containers may have been restarted.
func awaitRunning(t *testing.T, n *node.Node, pods []*corev1.Pod) {
	t.Helper()
	for _, pod := range pods {
		for _, c := range n.Running(pod.Name).Status.ContainerStatuses {
			if c.RestartCount > 0 {
				t.Errorf("the container %s of %s was restarted: %+v", c.Name, pod.Name, c.LastTerminationState)
			}
		}
	}
}

// pathInContainer returns the path in a container of a path of the node, by the innermost volume
// that contains it, or "" if the container does not have it.
func pathInContainer(spec corev1.PodSpec, c *corev1.Container, file string) (inside string) {
	nearest := ""
	for _, m := range c.VolumeMounts {
		for _, v := range spec.Volumes {
			if v.Name != m.Name || v.HostPath == nil || m.ReadOnly {
				continue
			}
			dir := path.Clean(v.HostPath.Path)
			if rel, ok := strings.CutPrefix(file, dir+"/"); ok && len(dir) > len(nearest) {
				nearest, inside = dir, path.Join(m.MountPath, rel)
			}
		}
	}
	return inside
}

// awaitStates waits until status shows the given state for each driver, and the driver as ready.
func awaitStates(n *node.Node, state string, sockets map[string]string) {
	n.Eventually(2*time.Minute, "all drivers to be "+state, func() error {
		var status struct {
			Drivers []struct{ Name, State, Driver, Reason string }
		}
		document, _ := n.Try("csi-registrar", "status", "--json") // may exit 1
		if err := json.Unmarshal([]byte(document), &status); err != nil {
			return err
		}
		var wrong []string
		for _, d := range status.Drivers {
			if d.State != state || d.Driver != "ready" {
				wrong = append(wrong, fmt.Sprintf("%s: %s, driver %s, %s", d.Name, d.State, d.Driver, d.Reason))
			}
		}
		if wrong != nil || len(status.Drivers) != len(sockets) {
			return fmt.Errorf("%d drivers, %s", len(status.Drivers), cmp.Or(strings.Join(wrong, "\n"), "all of them so"))
		}
		return nil
	})
}

// awaitCSINode waits until the CSINode has exactly these drivers, and returns them.
func awaitCSINode(n *node.Node, sockets map[string]string) (drivers []storagev1.CSINodeDriver) {
	n.Eventually(2*time.Minute, "the CSINode to have all drivers", func() error {
		csiNode, err := n.Cluster.API.StorageV1().CSINodes().Get(context.Background(), node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		drivers = csiNode.Spec.Drivers
		var names []string
		for _, d := range drivers {
			names = append(names, d.Name)
		}
		slices.Sort(names)
		if want := slices.Sorted(maps.Keys(sockets)); !slices.Equal(names, want) {
			return fmt.Errorf("it has %q, not %q", names, want)
		}
		return nil
	})
	return drivers
}
