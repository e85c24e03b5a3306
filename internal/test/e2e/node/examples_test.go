package node_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/node"
	"csi-registrar/internal/test/e2e/ociimage"
)

// TestDriverExamples checks that a driver with the files of an example, in a unit or in the pod of
// its DaemonSet without a registrar, is registered and publishes a pod's volume. When the node is
// switched off, the driver runs until it has unpublished the volume.
func TestDriverExamples(t *testing.T) {
	for _, suite := range node.Suites {
		for _, way := range []string{"unit", "daemonset"} {
			t.Run(suite+"/"+way, func(t *testing.T) {
				t.Parallel()
				n := node.New(t, suite)
				n.Install("0.1.99", "csi-registrar")
				dropIn := example(t, "60-hostpath.toml")
				n.Write("/etc/csi-registrar/conf.d/60-hostpath.toml", dropIn)
				if way == "unit" {
					asUnit(t, n)
				}
				n.Boot()
				if way == "daemonset" {
					asPod(t, n)
				}
				n.Registered()
				socket := regexp.MustCompile(`socket = "(.*)"`).FindStringSubmatch(dropIn)[1]
				n.CreateVolumeOf("hostpath.csi.k8s.io", socket, "data")
				n.CreatePod(node.Writer("writer", "data"))
				n.Running("writer")
				if targets := published(t, n); !strings.Contains(targets, pods) {
					t.Fatalf("the driver has published its volume at %q", targets)
				}
				before := time.Now()
				n.Poweroff()
				t.Logf("off after %s", time.Since(before))
				// The kubelet waits until its pods have ended, but not until it has unstaged their
				// volumes.
				if targets := published(t, n); strings.Contains(targets, pods) {
					t.Errorf("the driver was stopped while its volume was published at %s", targets)
				}
			})
		}
	}
}

// pods is the directory below which the kubelet publishes volumes.
const pods = "/var/lib/kubelet/pods/"

// asUnit installs the unit of the example, in a machine that is off.
func asUnit(t *testing.T, n *node.Node) {
	n.Write("/etc/systemd/system/csi-hostpath.service", example(t, "csi-hostpath.service"))
	n.Chroot("systemctl", "enable", "csi-hostpath.service")
	n.WriteMode("/usr/local/bin/hostpathplugin", read(t, built.Command(t, "upstream")), 0o755)
	n.WriteMode("/usr/bin/csi-sample-driver", read(t, built.SampleDriver(t)), 0o755)
}

// asPod creates the pod of the example's DaemonSet, as its controller and the scheduler would.
func asPod(t *testing.T, n *node.Node) {
	set := daemonSet(t)
	n.Write("/opt/driver.tar", string(ociimage.Image{
		Names:      []string{set.Spec.Template.Spec.Containers[0].Image},
		Entrypoint: []string{"/hostpathplugin"},
		Files:      map[string]string{"hostpathplugin": built.Command(t, "upstream"), "usr/bin/csi-sample-driver": built.SampleDriver(t)},
	}.Tar(t)))
	n.Run("ctr", "-n", "k8s.io", "image", "import", "--snapshotter", "native", "/opt/driver.tar")
	pod := &corev1.Pod{ObjectMeta: set.Spec.Template.ObjectMeta, Spec: set.Spec.Template.Spec}
	pod.Name, pod.Spec.NodeName = set.Name, node.Name
	pod.Spec.HostNetwork = true // the node has no other
	if _, err := n.Cluster.API.CoreV1().Pods(set.Namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func daemonSet(t *testing.T) *appsv1.DaemonSet {
	t.Helper()
	for document := range strings.SplitSeq(example(t, "daemonset.yaml"), "\n---\n") {
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if set, ok := object.(*appsv1.DaemonSet); ok {
			return set
		}
	}
	t.Fatal("there is no DaemonSet")
	return nil
}

// published returns the path at which the driver's only volume is published or staged, according to
// its record.
func published(t *testing.T, n *node.Node) string {
	t.Helper()
	found, err := filepath.Glob(n.Path("/var/lib/csi-hostpath-data/hostpathplugin/*/volume.json"))
	if err != nil || len(found) != 1 {
		t.Fatalf("the driver's volumes: %q %v", found, err)
	}
	targets := regexp.MustCompile(`"targets":\s*\[([^\]]*)\]`).FindStringSubmatch(read(t, found[0]))
	if targets == nil {
		return ""
	}
	return targets[1]
}

// example reads a file of the hostpath driver's example.
func example(t *testing.T, file string) string {
	t.Helper()
	return read(t, filepath.Join(built.Root(t), "packaging", "examples", "hostpath", file))
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
