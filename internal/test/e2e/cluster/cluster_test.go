// Package cluster runs the kubelet as Kubernetes builds it, with a container runtime that does
// nothing, an API server and csi-registrar, for tests that need thousands of calls but no
// containers. Whole nodes are in package node. It takes minutes: `make cluster-test`, not in CI.
package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/harness"
)

const (
	nodeName       = "node" // as in controlplane.Kubelet
	kubeletAddress = "127.0.0.1:10250"
)

func TestMain(m *testing.M) { harness.Main(m) }

// cluster is a control plane and one kubelet.
type cluster struct {
	*controlplane.ControlPlane
	t       *testing.T
	n       *harness.Node
	dir     string
	runtime *harness.Process
	kubelet *harness.Process
	// api is the address of the API server for the kubelet; empty if there is no proxy.
	api string
}

// start starts the control plane, with additional flags of the API server, and the kubelet, with
// the usual permissions of a kubelet.
func start(t *testing.T, flags ...string) *cluster {
	t.Helper()
	n := harness.New(t)
	flags = append(flags, "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction")
	c := &cluster{ControlPlane: controlplane.New(t, flags...), t: t, n: n, dir: filepath.Join(n.Dir, "c")}
	for _, d := range []string{c.dir, c.dir + "/plugins", c.dir + "/empty", c.dir + "/tunables"} {
		c.must(os.Mkdir(d, 0o700))
	}
	c.must(os.WriteFile(c.dir+"/kubelet.yaml", fmt.Appendf(nil, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
healthzPort: 0
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
`, n.Run, c.dir), 0o600))
	c.startKubelet()
	t.Cleanup(c.killKubelet)
	return c
}

// kubeconfig writes a user's kubeconfig and returns its path.
func (c *cluster) kubeconfig(user string) string {
	c.t.Helper()
	path := filepath.Join(c.dir, "kubeconfig-"+user)
	content := c.KubeconfigOf(user)
	if user == controlplane.Kubelet && c.api != "" {
		content = c.KubeconfigAt(user, c.api)
	}
	c.must(os.WriteFile(path, []byte(content), 0o600))
	return path
}

// startKubelet starts the kubelet and waits until it answers.
func (c *cluster) startKubelet() {
	c.t.Helper()
	c.launchKubelet()
	harness.Eventually(c.t, 2*time.Minute, "the kubelet answers", func() string {
		if !c.kubelet.Running() {
			c.t.Fatal("the kubelet ended")
		}
		resp, err := c.client().Get("https://" + kubeletAddress + "/healthz")
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return resp.Status
		}
		return ""
	})
}

// launchKubelet starts the kubelet of this module, or another version that KUBELET names (see
// scripts/kubelet), with a container runtime that has no containers.
func (c *cluster) launchKubelet() {
	c.t.Helper()
	binary := controlplane.Binary(c.t)
	c.runtime = harness.StartProcess(c.t, "fake-runtime", exec.Command(binary, "fake-runtime", c.n.Run+"/cri.sock"))
	// Without it the kubelet exits.
	harness.Eventually(c.t, time.Minute, "the container runtime listens", func() string {
		if !harness.Accepts(c.n.Run + "/cri.sock") {
			return "not yet"
		}
		return ""
	})
	kubelet := []string{binary, "kubelet"}
	if other := os.Getenv("KUBELET"); other != "" {
		kubelet = []string{other}
	}
	c.kubelet = harness.StartProcess(c.t, "kubelet", c.isolated(append(kubelet,
		"--config", c.dir+"/kubelet.yaml", "--kubeconfig", c.kubeconfig(controlplane.Kubelet), "--root-dir", c.n.Root,
		"--cert-dir", c.dir+"/certs", "--hostname-override", nodeName, "--v", "1")...))
}

func (c *cluster) killKubelet() {
	c.t.Helper()
	c.stopKubelet(syscall.SIGKILL)
}

// stopKubelet ends the kubelet by a signal, and all its pods, and removes the temporary files that
// it was writing, because the test searches the node's directories for such files of the daemon.
func (c *cluster) stopKubelet(sig syscall.Signal) {
	c.t.Helper()
	c.kubelet.End(sig, time.Minute)
	c.runtime.End(syscall.SIGKILL, time.Minute)
	files, err := filepath.Glob(c.n.Root + "/.[0-9]*")
	c.must(err)
	for _, f := range append(files, c.n.Run+"/cri.sock") {
		if err := os.Remove(f); !errors.Is(err, fs.ErrNotExist) {
			c.must(err)
		}
	}
}

// isolated returns a command that runs in the network namespace, with writable copies of the
// kernel's tunables and a /var/log of its own. It runs in an empty directory: the kubelet removes a
// deleted container's logs, LOGPATH*, and the fake runtime's containers have no log path (kubelet
// v1.36).
func (c *cluster) isolated(args ...string) *exec.Cmd {
	const script = `
for t in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
	cat /proc/sys/$t >"$0/${t##*/}"
	mount --bind "$0/${t##*/}" /proc/sys/$t
done
mount -t tmpfs tmpfs /var/log
exec "$@"`
	cmd := c.Command(append([]string{"/bin/sh", "-ec", script, c.dir + "/tunables"}, args...)...)
	cmd.Dir = c.dir + "/empty"
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	return cmd
}

// client returns a client of the kubelet.
func (c *cluster) client() *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: c.Dial, DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// watcher returns a client without limits of time and rate.
func (c *cluster) watcher() *kubernetes.Clientset {
	c.t.Helper()
	config := c.Config(controlplane.Admin)
	config.Timeout, config.QPS = 0, -1
	client, err := kubernetes.NewForConfig(config)
	c.must(err)
	return client
}

// version returns the current resource version of etcd, which all objects share.
func (c *cluster) version() string {
	c.t.Helper()
	list, err := c.API.CoreV1().Nodes().List(c.t.Context(), metav1.ListOptions{})
	c.must(err)
	return list.ResourceVersion
}

// watch reports each change after a version until ctx is done. If the API server ends a watch that
// is too slow, the next one continues where it ended.
func (c *cluster) watch(ctx context.Context, version string,
	watch func(context.Context, metav1.ListOptions) (apiwatch.Interface, error), report func(apiwatch.Event)) {
	for ctx.Err() == nil {
		w, err := watch(ctx, metav1.ListOptions{ResourceVersion: version})
		if err != nil {
			if ctx.Err() == nil {
				c.t.Errorf("cannot watch: %v", err)
			}
			return
		}
		for e := range w.ResultChan() {
			o, err := meta.Accessor(e.Object)
			if e.Type == apiwatch.Error || err != nil {
				if ctx.Err() == nil {
					c.t.Errorf("a watch reported %v", e)
				}
				w.Stop()
				return
			}
			version = o.GetResourceVersion()
			report(e)
		}
	}
}

func (c *cluster) csiNode() *storagev1.CSINode {
	c.t.Helper()
	n, err := c.API.StorageV1().CSINodes().Get(c.t.Context(), nodeName, metav1.GetOptions{})
	c.must(err)
	return n
}
