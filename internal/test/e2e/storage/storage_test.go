// Package storage runs Kubernetes' own storage tests for CSI drivers with the sample driver, on a
// whole node: registered by our package, with volumes from the real provisioner. It runs nightly
// and on request: make storage-test.
package storage_test

import (
	"bytes"
	"cmp"
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/node"
	"csi-registrar/internal/test/e2e/ociimage"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

const (
	suite   = "trixie"
	address = "192.0.2.1" // of the node; loopback addresses are refused
	// The tests wait more than they compute.
	parallel = "4"
	limit    = "90m"
	// Tests that are defined but not run: those of volumes without a driver, and tests with
	// pre-provisioned volumes that duplicate others.
	drivers = "External Storage|Pre-provisioned Storage.*Testpattern: Pre-provisioned PV"
)

func TestMain(m *testing.M) { built.Main(m) }

func TestSampleDriver(t *testing.T) {
	root := nspawn.Root(t, suite+"-node") // skips where no machine can be booted
	bin := programs(t)
	n := node.New(t, suite)
	n.Install("0.1.99", "csi-registrar", "csi-sample-driver")
	n.Write("/etc/systemd/system/csi-sample-driver.service.d/test.conf", driverDropIn)
	n.Write("/etc/hosts", "127.0.0.1 localhost\n"+address+" "+node.Name+"\n")
	kubelet := "/etc/kubernetes/kubelet.yaml"
	n.Write(kubelet, strings.Replace(n.Read(kubelet), "address: 127.0.0.1", "address: "+address, 1))
	n.Write("/etc/cni/net.d/10-loopback.conflist", `{"cniVersion": "0.4.0", "name": "fixed", "plugins": [{"type": "fixed"}]}`)
	for _, name := range []string{"loopback", "fixed"} {
		n.WriteMode("/usr/lib/cni/"+name, cni, 0o755) // the directory of Debian's containerd
	}
	run(t, n.Cluster.Command("ip", "address", "add", address+"/32", "dev", "lo"))
	n.Boot()
	importImages(t, n, root, bin)
	n.Registered()
	createCSIDriver(t, n)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(n.Cluster.Kubeconfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	startControllers(n, bin, kubeconfig)
	results(t, runSuite(t, n, bin, kubeconfig))
}

// The driver has a topology and a limit, so that these are tested too.
const driverDropIn = `[Service]
ExecStart=
ExecStart=/usr/bin/csi-sample-driver --socket ` + node.DriverSocket + ` --data /var/lib/csi-sample \
	--topology topology.csi-registrar.dev/node=node --max-volumes 20
`

// Pods need an address to become ready. No storage test connects to one.
const cni = `#!/bin/sh
set -eu
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0"]}' ;;
ADD)
	printf '{"cniVersion": "0.4.0", "interfaces": [{"name": "%s", "sandbox": "%s"}], "ips": [{"version": "4", "interface": 0, "address": "10.%d.%d.%d/8"}]}\n' \
		"$CNI_IFNAME" "$CNI_NETNS" $(printf %s "$CNI_CONTAINERID" | sed 's/\(..\)\(..\)\(..\).*/0x\1 0x\2 0x\3/')
	;;
esac
`

// importImages imports the images under the names that the tests use.
func importImages(t *testing.T, n *node.Node, root, bin string) {
	t.Helper()
	busybox := filepath.Join(root, "bin/busybox")
	applets := slices.DeleteFunc(strings.Fields(output(t, exec.Command(busybox, "--list"))),
		func(name string) bool { return name == "busybox" })
	images := map[string]*ociimage.Image{
		"agnhost": {Entrypoint: []string{"/agnhost"}, Command: []string{"pause"}},
		"pause":   {Entrypoint: []string{"/agnhost", "pause"}},
		"shell":   {Command: []string{"sh"}},
	}
	for line := range strings.Lines(output(t, exec.Command(filepath.Join(bin, "storage.test"), "--images"))) {
		kind, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		images[kind].Names = append(images[kind].Names, name)
	}
	for kind, image := range images {
		image.Links = ociimage.Applets(applets)
		image.Files = map[string]string{"bin/busybox": busybox}
		if image.Entrypoint != nil {
			image.Files["agnhost"] = filepath.Join(bin, "agnhost")
		}
		path := "/opt/" + kind + ".tar"
		n.Write(path, string(image.Tar(t)))
		n.Run("ctr", "--namespace=k8s.io", "image", "import", "--snapshotter=native", path)
	}
}

func createCSIDriver(t *testing.T, n *node.Node) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(built.Root(t), "packaging", "examples", "sample", "csidriver.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var driver storagev1.CSIDriver
	if err := yaml.UnmarshalStrict(b, &driver); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Cluster.API.StorageV1().CSIDrivers().Create(context.Background(), &driver, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// startControllers starts the other components of a control plane, and the sidecars of a driver
// with a controller service.
func startControllers(n *node.Node, bin, kubeconfig string) {
	socket := n.Path(node.DriverSocket)
	for _, args := range [][]string{
		{"kube-controller-manager", "--leader-elect=false", "--pvclaimbinder-sync-period=2s"},
		{"kube-scheduler", "--leader-elect=false"},
		{"csi-provisioner", "--csi-address=" + socket, "--enable-capacity", "--capacity-ownerref-level=-1", "--capacity-for-immediate-binding"},
		{"csi-resizer", "--csi-address=" + socket},
	} {
		cmd := n.Cluster.Command(append([]string{filepath.Join(bin, args[0]), "--kubeconfig=" + kubeconfig}, args[1:]...)...)
		// Of CSIStorageCapacity objects.
		cmd.Env = append(os.Environ(), "NAMESPACE="+metav1.NamespaceDefault, "POD_NAME="+args[0])
		n.Cluster.Start(args[0], cmd)
	}
}

// runSuite runs the tests, and returns the path of their report.
func runSuite(t *testing.T, n *node.Node, bin, kubeconfig string) string {
	t.Helper()
	dir := os.Getenv("STORAGE_REPORT") // kept
	if dir == "" {
		dir = t.TempDir()
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	definition, err := filepath.Abs("sample.yaml")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{
		filepath.Join(bin, "ginkgo"), "run", "--procs=" + parallel, "--timeout=" + limit, "--no-color",
		"--output-dir=" + dir, "--json-report=report.json", "--skip=" + strings.Join(slices.Collect(maps.Keys(leftOut)), "|"),
		"--focus=" + cmp.Or(os.Getenv("FOCUS"), drivers),
	}
	args = append(args, filepath.Join(bin, "storage.test"), "--",
		"--kubeconfig="+kubeconfig, "--storage.testdriver="+definition, "--driver-socket="+n.Path(node.DriverSocket),
		"--provider=local", "--e2e-verify-service-account=false")
	cmd := n.Cluster.Command(args...)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	start := time.Now()
	if err := cmd.Run(); err != nil {
		t.Errorf("ginkgo: %v", err)
	}
	t.Logf("the tests ended after %s", time.Since(start).Round(time.Second))
	report := filepath.Join(dir, "report.json")
	if _, err := os.Stat(report); err != nil {
		b, _ := os.ReadFile(log.Name())
		t.Fatalf("%v\n%s", err, b[max(0, len(b)-10000):])
	}
	return report
}

func run(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%q: %v\n%s", cmd.Args, err, out)
	}
}

func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%q: %v\n%s", cmd.Args, err, stderr.String())
	}
	return string(out)
}
