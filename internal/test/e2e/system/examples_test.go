package system

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/ociimage"
)

// examples are the directories of packaging/examples, without the sample driver's package.
var examples = []string{"nfs", "smb", "hostpath"}

// example reads the one file of that pattern in the directory of an example.
func example(t testing.TB, name, pattern string) (file, content string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(built.Root(t), "packaging", "examples", name, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s/%s: %q %v", name, pattern, found, err)
	}
	b, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Base(found[0]), string(b)
}

// exampleNode makes a node with the drop-ins of all examples and no driver yet.
func exampleNode(t *testing.T, suite string) *node {
	t.Helper()
	n := emptyNode(t, suite)
	for _, name := range examples {
		file, dropIn := example(t, name, "*.toml")
		n.Write("/etc/csi-registrar/conf.d/"+file, dropIn)
		n.drivers = append(n.drivers, name+".csi.k8s.io")
	}
	return n
}

// configured checks the drop-ins with `config check`.
func (n *node) configured() {
	n.t.Helper()
	if out := n.Run("csi-registrar", "config", "check"); !strings.Contains(out, "no errors: 3 drivers") {
		n.t.Errorf("config check says: %s", out)
	}
}

// TestDriversAsNativeUnits runs the units of the examples, with a program that has the flags of the
// upstream drivers. Each driver is registered, the kubelet sees its mounts, and at shutdown it runs
// until the kubelet has ended.
func TestDriversAsNativeUnits(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := exampleNode(t, suite)
		n.Chroot("rm", "/usr/lib/systemd/system/kubelet.service")
		units := n.nativeUnits()
		n.Chroot(append([]string{"systemctl", "enable"}, units...)...)
		n.Boot()
		n.configured()
		verify(t, n.Machine, units...)
		// Install kubelet.service, before which the units are ordered, without a daemon-reload.
		n.Write("/usr/lib/systemd/system/kubelet.service", strings.Replace(kubeletUnit, "[Service]\n", `[Service]
ExecStop=/bin/sh -c 'sleep 1; systemctl is-active `+strings.Join(units, " ")+` >/var/log/drivers-at-the-end'
`, 1))
		n.Run("systemctl", "start", "kubelet.service")
		n.registered(0)
		for _, name := range examples {
			n.mounts(name)
		}
		n.Poweroff()
		if states := n.Read("/var/log/drivers-at-the-end"); states != "active\nactive\nactive\n" {
			t.Errorf("when the kubelet was stopped by the shutdown, the drivers were %q, want all active", states)
		}
	})
}

// TestDriversAsQuadlets does the same with the Quadlets of the examples and images of the same
// names. The kubelet does not see when the containers are killed, restarted and replaced by units.
func TestDriversAsQuadlets(t *testing.T) {
	n := exampleNode(t, "trixie-podman")
	n.Args = append(n.Args, "--capability=all", "--system-call-filter=bpf keyctl add_key request_key",
		// The machine's disk is an overlay, on which another overlay is not possible.
		"--tmpfs=/var/lib/containers")
	// The machine has no controller for it.
	n.Write("/etc/containers/containers.conf", "[containers]\npids_limit = 0\n")
	driver := built.Command(t, "upstream")
	var units []string
	for _, name := range examples {
		file, quadlet := example(t, name, "*.container")
		n.Write("/etc/containers/systemd/"+file, quadlet)
		units = append(units, strings.TrimSuffix(file, ".container")+".service")
		image := regexp.MustCompile(`(?m)^Image=(.*)$`).FindStringSubmatch(quadlet)
		if image == nil {
			t.Fatalf("%s names no image", file)
		}
		program := name + "plugin"
		n.Write("/opt/"+name+".tar", string(ociimage.Image{
			Names: []string{image[1]}, Entrypoint: []string{"/" + program}, Files: map[string]string{program: driver, "usr/bin/csi-sample-driver": built.SampleDriver(t)},
		}.Tar(t)))
	}
	n.Boot()
	n.configured()
	if out := n.Run("/usr/libexec/podman/quadlet", "--dryrun"); strings.Count(out, "ExecStart=") != len(examples) {
		t.Errorf("Quadlet's generator says: %s", out)
	}
	verify := []string{"systemd-analyze", "verify", "--man=no"}
	for _, unit := range units {
		verify = append(verify, "/run/systemd/generator/"+unit)
	}
	if out := n.Run(verify...); out != "" {
		t.Errorf("systemd-analyze verify says: %s", out)
	}
	// Stopped, because systemd tries again each second without the images: a container that is
	// ended while podman starts it can take until the unit's time limit.
	n.Run(append([]string{"systemctl", "stop"}, units...)...)
	for _, name := range examples {
		n.Run("podman", "load", "--input", "/opt/"+name+".tar")
	}
	n.Run(append([]string{"systemctl", "start"}, units...)...)
	n.registered(0)
	for _, name := range examples {
		n.mounts(name)
	}
	// Without rshared the mounts stay in the container.
	const private = "csi-nfs.service"
	file, quadlet := example(t, "nfs", "*.container")
	n.Write("/etc/containers/systemd/"+file, strings.ReplaceAll(quadlet, ":rshared", ""))
	n.Run("systemctl", "daemon-reload")
	n.Run("systemctl", "restart", private)
	n.registered(0)
	if out, _ := n.Try("csi-registrar", "doctor", "nfs.csi.k8s.io"); !strings.Contains(out, "mounts-not-propagated") || !strings.Contains(out, "/var/lib/kubelet:/var/lib/kubelet:rshared") {
		t.Errorf("without rshared doctor says:\n%s", out)
	}
	n.Write("/etc/containers/systemd/"+file, quadlet)
	n.Run("systemctl", "daemon-reload")
	n.Run("systemctl", "restart", private)
	n.registered(0)
	if out, _ := n.Try("csi-registrar", "doctor"); strings.Contains(out, "mounts-not-propagated") {
		t.Errorf("with rshared doctor says:\n%s", out)
	}
	mark := n.mark()
	for i, unit := range units {
		pid := n.show(unit, "MainPID")
		n.Run("systemctl", "kill", "--signal=KILL", unit)
		n.Eventually(soon, unit+" to be started again", func() error {
			if now := n.show(unit, "MainPID"); now == pid || n.show(unit, "ActiveState") != "active" {
				return fmt.Errorf("process %s, %s", now, n.show(unit, "ActiveState"))
			}
			return nil
		})
		n.mounts(examples[i])
		n.Run("systemctl", "stop", unit)
		n.awaitState(unit, "inactive") // not failed
		n.Run("systemctl", "start", unit)
	}
	// The watchdog restarts the container of a driver that hangs.
	const hangs = "csi-nfs.service"
	n.Write("/etc/systemd/system/"+hangs+".d/watchdog.conf", `[Service]
WatchdogSec=5s
ExecStartPost=
ExecStartPost=/usr/bin/csi-registrar supervise --socket /var/lib/kubelet/plugins/csi-nfsplugin/csi.sock --watchdog 5s
`)
	n.Run("systemctl", "daemon-reload")
	n.Run("systemctl", "restart", hangs)
	pid := n.show(hangs, "MainPID")
	n.Run("podman", "kill", "--signal=STOP", "csi-nfs")
	n.Eventually(soon, hangs+" to be restarted by the watchdog", func() error {
		if now := n.show(hangs, "MainPID"); now == pid || n.show(hangs, "ActiveState") != "active" {
			return fmt.Errorf("process %s, %s", now, n.show(hangs, "ActiveState"))
		}
		return nil
	})
	n.mounts("nfs")
	// The unit of an example replaces its Quadlet.
	n.Run(append([]string{"systemctl", "stop"}, units...)...)
	n.nativeUnits()
	n.Run("systemctl", "daemon-reload")
	n.Run(append([]string{"systemctl", "start"}, units...)...)
	for _, name := range examples {
		n.mounts(name)
	}
	n.waited()
	n.quiet(mark)
}

// nativeUnits installs the units of the examples, and a program for each.
func (n *node) nativeUnits() (units []string) {
	n.t.Helper()
	driver, err := os.ReadFile(built.Command(n.t, "upstream"))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, name := range examples {
		file, unit := example(n.t, name, "*.service")
		n.Write("/etc/systemd/system/"+file, unit)
		n.WriteMode("/usr/local/bin/"+name+"plugin", string(driver), 0o755)
		units = append(units, file)
	}
	return units
}

// dial connects to the driver of an example.
func (n *node) dial(name string) *grpc.ClientConn {
	n.t.Helper()
	_, dropIn := example(n.t, name, "*.toml")
	socket := regexp.MustCompile(`socket = "(.*)"`).FindStringSubmatch(dropIn)[1]
	conn, err := grpc.NewClient("unix:"+n.Path(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.t.Fatal(err)
	}
	return conn
}

// publish makes the driver of an example publish a volume, and returns the volume ID and the
// directory below which it is staged and mounted.
func (n *node) publish(name string) (id, pod string) {
	n.t.Helper()
	conn := n.dial(name)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	capability := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
	volume, err := csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "data", VolumeCapabilities: []*csi.VolumeCapability{capability},
	}, grpc.WaitForReady(true))
	if err != nil {
		n.t.Fatalf("%s: %v", name, err)
	}
	id, pod = volume.GetVolume().GetVolumeId(), "/var/lib/kubelet/pods/"+name
	// The volume is staged below pod, too, because upstream's NFS driver does not stage volumes,
	// and its container has no other directory.
	staging := pod + "/globalmount"
	n.Run("mkdir", "-p", staging)
	node := csi.NewNodeClient(conn)
	if _, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability}); err != nil {
		n.t.Fatalf("%s: %v", name, err)
	}
	if _, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, TargetPath: pod + "/mount", VolumeCapability: capability,
	}); err != nil {
		n.t.Fatalf("%s: %v", name, err)
	}
	return id, pod
}

// mounts checks that the kubelet sees the mounts of the driver of an example.
func (n *node) mounts(name string) {
	n.t.Helper()
	id, pod := n.publish(name)
	target := pod + "/mount"
	if mounts := n.Run("cat", "/proc/1/mountinfo"); !strings.Contains(mounts, " "+target+" ") {
		n.t.Errorf("%s: what the driver published at %s is not mounted for the kubelet:\n%s", name, target, mounts)
	}
	conn := n.dial(name)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	node := csi.NewNodeClient(conn)
	if _, err := node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target}); err != nil {
		n.t.Fatalf("%s: %v", name, err)
	}
	if _, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: pod + "/globalmount"}); err != nil {
		n.t.Fatalf("%s: %v", name, err)
	}
	if mounts := n.Run("cat", "/proc/1/mountinfo"); strings.Contains(mounts, " "+pod+"/") {
		n.t.Errorf("%s: something is still mounted for the kubelet in %s:\n%s", name, pod, mounts)
	}
}
