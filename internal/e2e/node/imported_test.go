package node_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"csi-registrar/internal/e2e/built"
	"csi-registrar/internal/e2e/node"
	"csi-registrar/internal/e2e/ociimage"
)

// imported are manifests in internal/compat/testdata, each modeled on one of a real driver.
var imported = []string{"nfs", "smb", "hostpath", "ebs", "lvm", "hcloud", "cleanup", "open-local", "three", "longhorn"}

// importedImage has the programs that replace a driver, its registrar and other sidecars.
const importedImage = "localhost/csi-e2e/driver:1"

// TestImportedDaemonSets replaces the sidecars of ten drivers as `import` says, with the drop-ins
// and changed manifests in the tests of internal/compat, on a node without earlier files of these
// drivers. The drivers are replaced by fakes that do not create the directory of their socket,
// except those whose program is in $DRIVERS, a directory, under the name of its image (such as
// nfsplugin): these run with the arguments of their manifest.
func TestImportedDaemonSets(t *testing.T) {
	t.Parallel()
	n := node.New(t, "trixie")
	n.Install("0.1.99", "csi-registrar")
	n.Boot()
	files := map[string]string{
		"bin/pod": built.Command(t, "pod"), "bin/busybox": n.Path("/bin/busybox"),
		"bin/csi-sample-driver": built.SampleDriver(t), "bin/csi-registrar": built.Registrar(t),
	}
	real := realDrivers(t)
	for name, file := range real {
		files["bin/"+name] = file
	}
	n.Write("/opt/driver.tar", string(ociimage.Image{
		Names: []string{importedImage}, Files: files, Links: ociimage.Applets([]string{"sh", "rm"}),
	}.Tar(t)))
	n.Run("ctr", "-n", "k8s.io", "image", "import", "--snapshotter", "native", "/opt/driver.tar")

	sockets := map[string]string{} // by driver
	var before, after []*corev1.Pod
	for _, name := range imported {
		file := filepath.Join(built.Root(t), "internal", "compat", "testdata", "good", name)
		own := map[string]string{}
		for _, m := range table.FindAllStringSubmatch(read(t, file+".toml"), -1) {
			own[m[1]] = m[2]
		}
		maps.Copy(sockets, own)
		before = append(before, importedPods(t, file+".yaml", own, real)...)
		after = append(after, importedPods(t, file+".after", own, real)...)
	}
	if len(before) != len(imported) || len(after) != len(imported) || len(sockets) != len(imported)+2 {
		t.Fatalf("%d pods before, %d after, %d drivers", len(before), len(after), len(sockets))
	}

	// With the sidecars, then with the sidecars and the drop-ins.
	for _, pod := range before {
		n.CreatePod(pod)
	}
	awaitCSINode(n, sockets)
	for _, name := range imported {
		file := filepath.Join(built.Root(t), "internal", "compat", "testdata", "good", name+".toml")
		n.Write("/etc/csi-registrar/conf.d/60-"+name+".toml", read(t, file))
	}
	awaitStates(n, "conflict", sockets)

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
	awaitCSINode(n, sockets)
	for _, pod := range after {
		for _, c := range n.Running(pod.Name).Status.ContainerStatuses {
			if c.RestartCount > 0 {
				t.Errorf("the container %s of %s was restarted: %+v", c.Name, pod.Name, c.LastTerminationState)
			}
		}
	}

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
	if count := writes.Count("CSINode", mark); count != 0 {
		t.Errorf("the rollout wrote the CSINode %d times", count)
	}
	if mounts := n.Run("cat", "/proc/self/mounts"); strings.Contains(mounts, "/var/lib/kubelet/plugins/") {
		t.Errorf("a mount of a pod is left on the node:\n%s", mounts)
	}
}

// realDrivers returns the files in $DRIVERS by their name.
func realDrivers(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{}
	dir := os.Getenv("DRIVERS")
	if dir == "" {
		return files
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		files[e.Name()] = filepath.Join(dir, e.Name())
	}
	return files
}

// table is a driver's table in a drop-in.
var table = regexp.MustCompile(`\[driver\."(.*)"\]\nsocket = "(.*)"`)

// importedPods returns the pods of a manifest's workloads for Linux.
func importedPods(t *testing.T, file string, sockets, real map[string]string) (pods []*corev1.Pod) {
	t.Helper()
	for document := range strings.SplitSeq(read(t, file), "\n---\n") {
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		objects := []runtime.Object{object}
		if list, ok := object.(*corev1.List); ok {
			objects = nil
			for _, item := range list.Items {
				object, _, err := scheme.Codecs.UniversalDeserializer().Decode(item.Raw, nil, nil)
				if err != nil {
					t.Fatalf("%s: %v", file, err)
				}
				objects = append(objects, object)
			}
		}
		for _, object := range objects {
			var template corev1.PodTemplateSpec
			var name string
			switch w := object.(type) {
			case *appsv1.DaemonSet:
				name, template = w.Name, w.Spec.Template
			case *appsv1.StatefulSet:
				name, template = w.Name, w.Spec.Template
			default:
				continue
			}
			if template.Spec.NodeSelector["kubernetes.io/os"] != "windows" {
				pods = append(pods, importedPod(t, name, template.Spec, sockets, real))
			}
		}
	}
	return pods
}

// importedPod puts programs into a pod: for a registrar `run` with the sidecar's flags; fake
// drivers in the first container that sees each socket; and for all others a program that does
// nothing and does not end.
func importedPod(t *testing.T, name string, spec corev1.PodSpec, sockets, real map[string]string) *corev1.Pod {
	t.Helper()
	yes, no, grace := true, false, int64(10)
	served := map[string]bool{}
	// the node has no other network
	spec.NodeName, spec.HostNetwork, spec.PriorityClassName = node.Name, true, ""
	spec.AutomountServiceAccountToken, spec.EnableServiceLinks, spec.TerminationGracePeriodSeconds = &no, &no, &grace
	for i := range spec.Containers {
		c := &spec.Containers[i]
		image, _, _ := strings.Cut(path.Base(c.Image), ":")
		c.Image, c.ImagePullPolicy = importedImage, corev1.PullNever
		c.LivenessProbe, c.Ports, c.EnvFrom = nil, nil, nil
		c.SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		if slices.ContainsFunc(c.Args, func(arg string) bool { return strings.HasPrefix(arg, "--kubelet-registration-path") }) {
			c.Command = []string{"/bin/csi-registrar", "run"}
			continue
		}
		var script []string
		for _, driver := range slices.Sorted(maps.Keys(sockets)) {
			if inside := pathInContainer(spec, c, sockets[driver]); inside != "" && !served[driver] && !strings.Contains(c.Name, "liveness") {
				served[driver] = true
				script = append(script, fmt.Sprintf("[ -d %s ] || exit 1; csi-sample-driver --name %s --socket %s --data /tmp/%[2]s & pids=\"$pids $!\"",
					path.Dir(inside), driver, inside))
			}
		}
		if script != nil && real[image] != "" {
			t.Logf("%s runs %s %q", name, image, c.Args)
			c.Command = []string{"/bin/" + image}
			continue
		}
		c.Command, c.Args = []string{"/bin/pod", "pause"}, nil
		if script != nil {
			c.Command = []string{"/bin/sh", "-c", strings.Join(script, "; ") + `; trap "kill $pids" TERM; wait $pids; wait $pids`}
		}
	}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault}, Spec: spec}
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

// awaitCSINode waits until the CSINode has exactly these drivers.
func awaitCSINode(n *node.Node, sockets map[string]string) {
	n.Eventually(2*time.Minute, "the CSINode to have all drivers", func() error {
		csiNode, err := n.Cluster.API.StorageV1().CSINodes().Get(context.Background(), node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var names []string
		for _, d := range csiNode.Spec.Drivers {
			names = append(names, d.Name)
		}
		slices.Sort(names)
		if want := slices.Sorted(maps.Keys(sockets)); !slices.Equal(names, want) {
			return fmt.Errorf("it has %q, not %q", names, want)
		}
		return nil
	})
}
