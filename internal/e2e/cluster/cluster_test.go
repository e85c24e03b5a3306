// Package cluster runs etcd, the API server and the kubelet as Kubernetes builds them,
// and csi-registrar beside them. It takes minutes to compile: `make cluster-test`, not CI.
package cluster

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"csi-registrar/internal/e2e/harness"
	"csi-registrar/internal/fake"
)

const (
	nodeName = "node"
	token    = "a-token-for-a-test-on-127.0.0.1"
)

// cluster is a control plane and one kubelet.
type cluster struct {
	t           *testing.T
	n           *harness.Node
	dir         string
	api         *kubernetes.Clientset
	apiAddr     string
	kubelet     *harness.Process
	kubeletAddr string
	starts      int
}

func start(t *testing.T) *cluster {
	t.Helper()
	n := harness.New(t)
	c := &cluster{t: t, n: n, dir: filepath.Join(n.Dir, "c")}
	for _, d := range []string{c.dir, c.dir + "/etcd", c.dir + "/certs", c.dir + "/scratch", c.dir + "/plugins", c.dir + "/empty"} {
		c.must(os.Mkdir(d, 0o700))
	}
	ports := freePorts(t, 4)
	etcd := fmt.Sprintf("http://127.0.0.1:%d", ports[0])
	c.run("etcd", c.dir+"/etcd", etcd, fmt.Sprintf("http://127.0.0.1:%d", ports[1]))

	c.must(os.WriteFile(c.dir+"/tokens.csv", []byte(token+`,system:node:`+nodeName+`,1,"system:nodes,system:masters"`+"\n"), 0o600))
	c.must(os.WriteFile(c.dir+"/sa.pem", newKey(t), 0o600))
	c.apiAddr = fmt.Sprintf("127.0.0.1:%d", ports[2])
	c.run("kube-apiserver",
		"--etcd-servers", etcd, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(ports[2]),
		"--cert-dir", c.dir+"/certs", "--token-auth-file", c.dir+"/tokens.csv", "--authorization-mode", "AlwaysAllow",
		"--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition", "--endpoint-reconciler-type", "none",
		"--service-account-issuer", "https://test", "--service-account-key-file", c.dir+"/sa.pem", "--service-account-signing-key-file", c.dir+"/sa.pem",
		"--service-cluster-ip-range", "10.0.0.0/24")
	var err error
	c.api, err = kubernetes.NewForConfig(&rest.Config{
		Host: "https://" + c.apiAddr, BearerToken: token, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: 100, Burst: 100,
	})
	c.must(err)
	harness.Eventually(t, time.Minute, "the API server is ready", func() string {
		b, err := c.api.RESTClient().Get().AbsPath("/readyz").DoRaw(t.Context())
		if err != nil {
			return fmt.Sprintf("%v %s", err, b)
		}
		return ""
	})
	c.kubeletAddr = fmt.Sprintf("127.0.0.1:%d", ports[3])
	c.writeKubeletFiles(ports[3])
	c.startKubelet()
	return c
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// run starts this binary in a role.
func (c *cluster) run(as string, args ...string) *harness.Process {
	c.t.Helper()
	self, err := os.Executable()
	c.must(err)
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), role+"="+as)
	if as == "kubelet" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		// It removes a deleted container's logs, LOGPATH*. The fake runtime's containers have no
		// log path: that is every file in the working directory (kubelet v1.36).
		cmd.Dir = c.dir + "/empty"
	}
	return harness.StartProcess(c.t, as, cmd)
}

func (c *cluster) writeKubeletFiles(port int) {
	c.t.Helper()
	c.must(os.WriteFile(c.dir+"/kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %q}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, c.apiAddr, token), 0o600))
	c.must(os.WriteFile(c.dir+"/kubelet.yaml", fmt.Appendf(nil, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
port: %d
healthzPort: 0
readOnlyPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
resolvConf: ""
containerRuntimeEndpoint: unix://%s/cri.sock
volumePluginDir: %s/plugins
`, port, c.n.Run, c.dir), 0o600))
}

func (c *cluster) startKubelet() {
	c.t.Helper()
	c.starts++
	scratch := fmt.Sprintf("%s/scratch/%d", c.dir, c.starts)
	c.must(os.Mkdir(scratch, 0o700))
	if err := os.Remove(c.n.Run + "/cri.sock"); err != nil && !os.IsNotExist(err) {
		c.t.Fatal(err)
	}
	c.kubelet = c.run("kubelet", c.n.Run+"/cri.sock", scratch,
		"--config", c.dir+"/kubelet.yaml", "--kubeconfig", c.dir+"/kubeconfig", "--root-dir", c.n.Root,
		"--cert-dir", c.dir+"/certs", "--hostname-override", nodeName, "--v", "1")
}

// ready waits for a node status that is Ready and not older than a time. A heartbeat has whole
// seconds, and while nothing changes the next one comes after 5 minutes (kubelet v1.36): the first
// of a kubelet that was started in the second of after must be enough.
func (c *cluster) ready(after time.Time) {
	c.t.Helper()
	after = after.Truncate(time.Second)
	harness.Eventually(c.t, time.Minute, "the node is Ready", func() string {
		if !c.kubelet.Running() {
			c.t.Fatal("the kubelet ended")
		}
		node, err := c.api.CoreV1().Nodes().Get(c.t.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		for _, s := range node.Status.Conditions {
			if s.Type == corev1.NodeReady && s.Status == corev1.ConditionTrue && !s.LastHeartbeatTime.Time.Before(after) {
				return ""
			}
		}
		return fmt.Sprint(node.Status.Conditions)
	})
}

func (c *cluster) csiNode() *storagev1.CSINode {
	c.t.Helper()
	n, err := c.api.StorageV1().CSINodes().Get(c.t.Context(), nodeName, metav1.GetOptions{})
	c.must(err)
	return n
}

func freePorts(t *testing.T, n int) []int {
	t.Helper()
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports
}

func newKey(t *testing.T) []byte {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
}

// Twenty drivers in the CSINode of a real API server; twenty restarts of the daemon, by
// TERM and by KILL, without one write to it; and the kubelet's own restart.
func TestTwentyDriversTwentyRestarts(t *testing.T) {
	c := start(t)
	var names []string
	for i := range 20 {
		name := fmt.Sprintf("d%02d.example", i)
		names = append(names, name)
		d := c.n.AddDriver(name)
		d.Set(func(b *fake.Answers) {
			b.MaxVolumes = int64(i + 1)
			b.Topology = map[string]string{"example/zone": "1"}
		})
		d.Start()
	}
	m := c.n.Manager()
	daemon := m.StartDaemon()
	c.ready(time.Time{})
	for _, name := range names {
		daemon.WaitState(name, "registered", time.Minute)
	}
	before := c.csiNode()
	have := map[string]storagev1.CSINodeDriver{}
	for _, d := range before.Spec.Drivers {
		have[d.Name] = d
	}
	for i, name := range names {
		d := have[name]
		if d.NodeID != "id-of-"+name || d.Allocatable == nil || *d.Allocatable.Count != int32(i+1) || len(d.TopologyKeys) != 1 {
			t.Errorf("CSINode has %+v for %s", d, name)
		}
	}

	for i := range 20 {
		sig := syscall.SIGTERM
		if i%2 == 1 {
			sig = syscall.SIGKILL
		}
		daemon = m.Restart(daemon, sig)
		for _, name := range names {
			daemon.WaitState(name, "registered", time.Minute)
		}
	}
	harness.Never(t, 3*time.Second, "the CSINode was written", func() string {
		if now := c.csiNode(); now.ResourceVersion != before.ResourceVersion {
			return fmt.Sprintf("version %s, was %s", now.ResourceVersion, before.ResourceVersion)
		}
		return ""
	})

	// A kubelet that is killed and started again finds all sockets, and writes nothing new.
	at := time.Now()
	c.kubelet.End(syscall.SIGKILL, 10*time.Second)
	c.startKubelet()
	c.ready(at)
	for _, name := range names {
		daemon.WaitStatus(name, "asked by the new kubelet", time.Minute, func(s harness.DriverStatus) bool {
			return s.State == "registered" && s.LastGetInfoAt.After(at)
		})
	}
	if now := c.csiNode(); now.ResourceVersion != before.ResourceVersion {
		t.Errorf("the kubelet's restart wrote the CSINode: version %s, was %s", now.ResourceVersion, before.ResourceVersion)
	}

	// The measure can fail: a socket that is taken away is seen.
	if err := os.Remove(c.n.RegSocket(names[0])); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, time.Minute, "a removed socket is a write", func() string {
		if c.csiNode().ResourceVersion == before.ResourceVersion {
			return "none yet"
		}
		return ""
	})
	daemon.WaitStatus(names[0], "registered again", time.Minute, func(s harness.DriverStatus) bool {
		return s.State == "registered" && s.Republications == 1
	})
}
