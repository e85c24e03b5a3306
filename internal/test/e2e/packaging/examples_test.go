package packaging

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"csi-registrar/internal/test/e2e/built"
)

// TestExampleManifests checks that the DaemonSets of the examples have no fields that are unknown
// to Kubernetes, match the drop-in beside them, and have no registrar. When the upstream sidecar is
// added, `csi-registrar import` prints that drop-in.
func TestExampleManifests(t *testing.T) {
	for _, name := range []string{"nfs", "smb", "hostpath"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(built.Root(t), "packaging", "examples", name)
			manifest := filepath.Join(dir, "daemonset.yaml")
			driver, set := manifests(t, manifest)
			dropIn := read(t, only(t, filepath.Join(dir, "60-*.toml")))
			if !strings.Contains(dropIn, `[driver."`+driver.Name+`"]`) {
				t.Errorf("the CSIDriver is %s, the drop-in\n%s", driver.Name, dropIn)
			}
			if out, err := exec.Command(built.Registrar(t), "import", manifest).CombinedOutput(); err == nil || !strings.Contains(string(out), "no workload with a node-driver-registrar") {
				t.Errorf("import: %v\n%s", err, out)
			}
			// The unit, the Quadlet and the DaemonSet run the same version of the driver.
			image := set.Spec.Template.Spec.Containers[0].Image
			for _, file := range []string{"csi-" + name + ".container", "csi-" + name + ".service"} {
				if !strings.Contains(read(t, filepath.Join(dir, file)), image+"\n") {
					t.Errorf("%s has another image than %s", file, image)
				}
			}

			registered(set, filepath.Dir(socketOf(t, dropIn)))
			b, err := json.Marshal(set)
			if err != nil {
				t.Fatal(err)
			}
			withSidecar := filepath.Join(t.TempDir(), "daemonset.yaml")
			if err := os.WriteFile(withSidecar, b, 0o600); err != nil {
				t.Fatal(err)
			}
			imported := exec.Command(built.Registrar(t), "import", "--name", driver.Name, withSidecar)
			var stderr bytes.Buffer
			imported.Stderr = &stderr
			out, err := imported.Output()
			if err != nil {
				t.Fatalf("import: %v\n%s", err, &stderr)
			}
			if got, want := settings(string(out)), settings(dropIn); got != want {
				t.Errorf("import makes\n%s, the example is\n%s", got, want)
			}
		})
	}
}

// manifests reads the CSIDriver and the DaemonSet of an example.
func manifests(t *testing.T, file string) (driver *storagev1.CSIDriver, set *appsv1.DaemonSet) {
	t.Helper()
	decode := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer().Decode
	for document := range strings.SplitSeq(read(t, file), "\n---\n") {
		object, _, err := decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		switch object := object.(type) {
		case *storagev1.CSIDriver:
			driver = object
		case *appsv1.DaemonSet:
			set = object
		default:
			t.Errorf("there is a %T", object)
		}
	}
	if driver == nil || set == nil {
		t.Fatal("there is no CSIDriver, or no DaemonSet")
	}
	return driver, set
}

// registered adds the sidecar to a DaemonSet, with upstream's arguments.
func registered(set *appsv1.DaemonSet, socketDir string) {
	pod := &set.Spec.Template.Spec
	pod.Containers = append(pod.Containers, corev1.Container{
		Name:  "node-driver-registrar",
		Image: "registry.example/sig-storage/csi-node-driver-registrar:v2.18.0",
		Args:  []string{"--v=2", "--csi-address=/csi/csi.sock", "--kubelet-registration-path=" + socketDir + "/csi.sock"},
		VolumeMounts: []corev1.VolumeMount{
			{Name: "socket", MountPath: "/csi"},
			{Name: "registration-dir", MountPath: "/registration"},
		},
	})
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "registration-dir", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins_registry"},
	}})
}

func socketOf(t *testing.T, dropIn string) string {
	t.Helper()
	_, rest, _ := strings.Cut(dropIn, `socket = "`)
	path, _, ok := strings.Cut(rest, `"`)
	if !ok {
		t.Fatalf("the drop-in has no socket:\n%s", dropIn)
	}
	return path
}

// settings returns the lines of a TOML file without comments and empty lines.
func settings(file string) string {
	var kept strings.Builder
	for line := range strings.Lines(file) {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line != "" {
			kept.WriteString(line + "\n")
		}
	}
	return kept.String()
}
