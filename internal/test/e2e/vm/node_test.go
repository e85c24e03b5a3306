package vm_test

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/node"
	"csi-registrar/internal/test/e2e/system/nspawn"
	"csi-registrar/internal/test/e2e/vm"
	"csi-registrar/internal/test/fake"
)

// standardRuntime has the containerd settings that the kubelet's documentation recommends for
// systemd cgroups; all others are the defaults.
const standardRuntime = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + node.Image + `"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
`

const (
	daemon = "csi-registrar.service"
	volume = "data"
	// podMemory is the writer's limit, 64 MiB.
	podMemory = "67108864"
)

// slowUnit gives the daemon more time on an emulated processor with other load: its start took
// longer than the unit allows, and the watchdog killed it. The normal limits are tested in
// containers.
const slowUnit = `[Service]
TimeoutStartSec=10min
TimeoutStopSec=10min
WatchdogSec=10min
`

// probe prints what it can reach of the things that the daemon's sandbox hides.
const probe = `for path in /run/containerd/containerd.sock /run/dbus/system_bus_socket /run/systemd/private \
	/var/lib/kubelet/pki/kubelet.key /etc/kubernetes/kubeconfig /proc/1/root/etc; do
	[ ! -e $path ] || echo reached $path
done
[ -z "$(cat /etc/shadow 2>/dev/null)" ] || echo read /etc/shadow
! grep -q eth0 /proc/self/net/dev || echo saw the network
! mount -t tmpfs none /mnt 2>/dev/null || echo mounted
! touch /etc/probe 2>/dev/null || echo wrote to /etc
`

// reached is the output of probe without a sandbox.
const reached = `reached /run/containerd/containerd.sock
reached /run/dbus/system_bus_socket
reached /run/systemd/private
reached /var/lib/kubelet/pki/kubelet.key
reached /etc/kubernetes/kubeconfig
reached /proc/1/root/etc
read /etc/shadow
saw the network
mounted
wrote to /etc
`

// wholeNode is a machine with a container runtime, the kubelet and our packages, and its API
// server.
type wholeNode struct {
	*vm.Machine
	*node.Client
	t      *testing.T
	handle string // of the volume
}

func newWholeNode(t *testing.T) *wholeNode {
	t.Helper()
	cluster := controlplane.New(t)
	n := &wholeNode{t: t, Client: node.NewClient(t, cluster, limit)}
	n.Machine = vm.New(t, func(disk *nspawn.Machine) {
		node.Prepare(t, disk, node.Settings{
			Name:        node.Name,
			Kubeconfig:  cluster.KubeconfigAt(controlplane.Kubelet, vm.HostAddress+":"+controlplane.Port),
			Containerd:  standardRuntime,
			Snapshotter: "overlayfs",
		})
		put(t, disk, node.Kubelet(t), node.KubeletPath, 0o755)
		disk.Write(node.KubeletConfigPath, node.KubeletConfig("cgroupDriver: systemd"))
		for _, name := range []string{"csi-registrar", "csi-sample-driver"} {
			debs, err := filepath.Glob(filepath.Join(built.Packages(t, newer), name+"_*.deb"))
			if err != nil || len(debs) != 1 {
				t.Fatal(debs, err)
			}
			put(t, disk, debs[0], "/opt/"+name+".deb", 0o644)
			disk.Chroot("dpkg", "-i", "/opt/"+name+".deb")
		}
		disk.Write("/etc/systemd/system/"+daemon+".d/slow.conf", slowUnit)
		n.handle = makeVolume(t, disk.Path("/var/lib/csi-sample"))
	})
	n.Network = cluster.Path()
	return n
}

// makeVolume creates the volume on the machine's disk with a driver outside, because the driver
// inside cannot be called from outside.
func makeVolume(t *testing.T, data string) (handle string) {
	t.Helper()
	socket := filepath.Join(fake.ShortDir(t), "csi.sock")
	ctx, stop := context.WithCancel(t.Context())
	driver := exec.CommandContext(ctx, built.SampleDriver(t), "--socket", socket, "--data", data)
	if err := driver.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stop(); _ = driver.Wait() }() // ends with an error: it was killed
	return node.MakeVolume(t, socket, volume)
}

// ready waits until the Node is Ready, after the first boot.
func (n *wholeNode) ready() {
	n.t.Helper()
	start := time.Now()
	n.Eventually(limit, "the node to be Ready", func() error {
		object, err := n.Cluster.API.CoreV1().Nodes().Get(n.t.Context(), node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range object.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%+v", object.Status.Conditions)
	})
	n.t.Logf("the node is Ready %s after the end of the boot", time.Since(start).Round(time.Second))
}

// registered waits until the daemon has registered the driver.
func (n *wholeNode) registered() {
	n.t.Helper()
	n.Run("csi-registrar wait --timeout " + limit.String())
}

// lines returns how many lines the pod has written.
func (n *wholeNode) lines() int {
	n.t.Helper()
	count, err := strconv.Atoi(strings.TrimSpace(n.Run("wc -l </var/lib/csi-sample/" + n.handle + "/data/" + node.WriterFile)))
	if err != nil {
		n.t.Fatal(err)
	}
	return count
}

// writes waits until the pod has written more.
func (n *wholeNode) writes() {
	n.t.Helper()
	before := n.lines()
	n.Eventually(limit, "lines of the pod", func() error {
		if now := n.lines(); now <= before {
			return fmt.Errorf("%d as before", now)
		}
		return nil
	})
}

// show returns a property of the daemon's unit.
func (n *wholeNode) show(property string) string {
	n.t.Helper()
	return strings.TrimSpace(n.Run("systemctl show --value --property=" + property + " " + daemon))
}

// prints compares the output of a script with a text.
func (n *wholeNode) prints(want, script string) {
	n.t.Helper()
	if got := strings.TrimSpace(n.Run(script)); got != want {
		n.t.Errorf("%s\nprints %q, want %q", script, got, want)
	}
}

// TestWholeNodeWithAKernelOfItsOwn runs a node with the default cgroup settings of the kubelet and
// the runtime. A restart and a kill of the daemon cost no write, the daemon's limits and sandbox
// are in force, and a pod with a volume continues after a power cut.
func TestWholeNodeWithAKernelOfItsOwn(t *testing.T) {
	n := newWholeNode(t)
	start := time.Now()
	n.Boot()
	t.Logf("booted after %s", time.Since(start).Round(time.Second))
	n.ready()
	n.registered()

	n.BindVolume(node.Driver, volume, n.handle)
	pod := node.Writer("writer", volume)
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse(podMemory)}
	start = time.Now()
	n.CreatePod(pod)
	n.Running(pod.Name)
	t.Logf("the pod is Ready after %s", time.Since(start).Round(time.Second))
	n.writes()

	n.cgroups(pod.Name)
	n.limits()
	n.sandbox()
	n.quietRestarts(pod)
	n.powerCut(pod.Name)
}

// cgroups checks that the pod is in the default cgroup, with its memory limit, and so are all pods.
func (n *wholeNode) cgroups(pod string) {
	n.t.Helper()
	const ofWriter = "$(cut -d : -f 3 /proc/$(pgrep -o -f '^/bin/pod write')/cgroup)"
	uid := strings.ReplaceAll(string(n.Pod(pod).UID), "-", "_")
	want := "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + uid + ".slice/cri-containerd-"
	if got := n.Run("echo " + ofWriter); !strings.HasPrefix(got, want) {
		n.t.Errorf("the pod's cgroup is %swant %s...", got, want)
	}
	n.prints(podMemory, "cat /sys/fs/cgroup"+ofWriter+"/memory.max")
	if limit := n.Run("cat /sys/fs/cgroup/kubepods.slice/memory.max"); limit == "max\n" {
		n.t.Error("the pods together have no limit: the kubelet does not enforce what is allocatable")
	}
	n.prints("overlayfs", "stat --file-system --format=%T /proc/$(pgrep -o -f '^/bin/pod write')/root/")
}

// limits checks the limits of the unit in the kernel.
func (n *wholeNode) limits() {
	n.t.Helper()
	pid := n.show("MainPID")
	n.prints(n.show("MemoryMax"), "cat /sys/fs/cgroup$(cut -d : -f 3 /proc/"+pid+"/cgroup)/memory.max")
	n.prints("268435456", "cat /sys/fs/cgroup/system.slice/"+daemon+"/memory.max")
	const none = "0000000000000000"
	n.prints("CapInh "+none+" CapPrm "+none+" CapEff "+none+" CapBnd "+none+" CapAmb "+none+" NoNewPrivs 1 Seccomp 2",
		`awk -F '[:\t]+' '/^(Cap|NoNewPrivs:|Seccomp:)/ { printf "%s %s ", $1, $2 }' /proc/`+pid+"/status")
}

// sandbox checks that a command of the unit, in the daemon's sandbox, does not reach what other
// processes of root reach.
func (n *wholeNode) sandbox() {
	n.t.Helper()
	n.Run("cat >/opt/probe <<'END'\n" + probe + "END\n")
	n.prints(strings.TrimSpace(reached), "sh /opt/probe; umount /mnt; rm /etc/probe")
	n.Run(`printf '[Service]\nExecStartPost=/bin/sh -c "sh /opt/probe >/run/csi-registrar/state/probed 2>&1; echo done >>/run/csi-registrar/state/probed"\n' \
			>/etc/systemd/system/` + daemon + `.d/probe.conf
		systemctl daemon-reload && systemctl restart ` + daemon)
	n.prints("done", "cat /run/csi-registrar/state/probed")
	n.Run("rm /run/csi-registrar/state/probed /etc/systemd/system/" + daemon + ".d/probe.conf && systemctl daemon-reload")
	n.registered()
}

// quietRestarts checks that neither a restart nor a kill of the daemon makes the kubelet write
// anything.
func (n *wholeNode) quietRestarts(pod *corev1.Pod) {
	n.t.Helper()
	writes := n.WatchWrites(n.t)
	n.Eventually(limit, "the driver in the CSINode", func() error {
		if !writes.HasDriver() {
			return fmt.Errorf("%+v", writes.Since(time.Time{}))
		}
		return nil
	})
	began := time.Now()
	for _, how := range []string{"systemctl restart " + daemon, "kill -9 $(systemctl show --value --property=MainPID " + daemon + ")"} {
		before := n.show("MainPID")
		n.Run(how)
		n.Eventually(limit, "another process after "+how, func() error {
			if now := n.show("MainPID"); now == before || now == "0" || n.show("ActiveState") != "active" {
				return fmt.Errorf("process %s, before %s", now, before)
			}
			return nil
		})
		n.registered()
		n.writes()
	}
	// The kubelet checks its plugins every second. The end and the start of a pod take much longer.
	n.DeletePod(pod.Name)
	n.CreatePod(pod)
	n.Running(pod.Name)
	n.writes()
	n.t.Logf("after a restart and a kill: %d CSINode writes, %d Node writes", writes.Count("CSINode", began), writes.Count("Node", began))
	if all := writes.Since(began); len(all) > 0 {
		n.t.Errorf("a restart and a kill cost writes: %+v", all)
	}
	// This time the kubelet must notice.
	began = time.Now()
	n.Run("rm " + registry + "/" + node.Driver + "-reg.sock")
	n.Eventually(limit, "the writes of another registration", func() error {
		if writes.Count("CSINode", began) < 2 || !writes.HasDriver() {
			return fmt.Errorf("%+v", writes.Since(began))
		}
		return nil
	})
	n.registered()
}

// powerCut checks that after a power cut the pod writes again without any action.
func (n *wholeNode) powerCut(pod string) {
	n.t.Helper()
	uid := n.Pod(pod).UID
	// The kubelet and the runtime are responsible for what they have just written.
	n.Run("sync")
	n.PowerCut()
	start := time.Now()
	n.Boot()
	n.t.Logf("booted after %s", time.Since(start).Round(time.Second))
	n.registered()
	n.Eventually(limit, "the pod's process", func() error {
		_, err := n.Try("pgrep -f '^/bin/pod write'")
		return err
	})
	n.t.Logf("the pod runs %s after the power came back", time.Since(start).Round(time.Second))
	n.writes()
	if now := n.Pod(pod); now == nil || now.UID != uid {
		n.t.Errorf("not the pod of before the power cut: %+v", now)
	}
	n.cgroups(pod)
	n.limits()
}
