package kit_test

import (
	"os"
	"testing"

	"csi-registrar/internal/test/e2e/built"
)

// TestContainerfile builds the image of rollout.md, way A, with podman, carries it as a file as
// offline.md says, and runs it as a sidecar.
func TestContainerfile(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "trixie-podman", "node")
	m.Args = append(m.Args, "--capability=all", "--system-call-filter=bpf keyctl add_key request_key",
		// The machine's disk is an overlay, on which another one is not possible.
		"--tmpfs=/var/lib/containers")
	// The machine has no controller for it.
	m.Write("/etc/containers/containers.conf", "[containers]\npids_limit = 0\n")
	program, err := os.ReadFile(built.Registrar(t))
	if err != nil {
		t.Fatal(err)
	}
	m.WriteMode("/opt/image/csi-registrar", string(program), 0o755)
	m.Write("/opt/image/Containerfile", read(t, "packaging/examples/cluster/Containerfile"))
	m.Boot()
	const image = "registry.example/csi-registrar:0.1.0"
	m.Run("podman", "build", "--tag", image, "/opt/image")
	m.Run("podman", "save", "--output", "/opt/image.tar", image)
	m.Run("podman", "rmi", image)
	m.Run("podman", "load", "--input", "/opt/image.tar")
	m.Run("podman", "run", "--detach", "--pull", "never", "--network", "none", "--name", "sidecar", "--volume", "/run/csi-sample:/csi",
		"--volume", "/var/lib/kubelet/plugins_registry:/registration", image,
		"--csi-address=/csi/csi.sock", "--kubelet-registration-path=/run/csi-sample/csi.sock")
	m.registered(driver, true)
	m.Run("podman", "stop", "sidecar")
	m.registered(driver, false)
}
