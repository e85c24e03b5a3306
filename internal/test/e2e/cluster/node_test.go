package cluster

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"csi-registrar/internal/test/e2e/harness"
)

const nodeDriver = "node.example"

// TestNodeDeletedAndCreatedAgain checks what troubleshooting.md says about a deleted Node object: a
// running kubelet does not recreate it or the CSINode, and a CSINode that it must create for a
// driver has the deleted Node as its owner, so that the garbage collector deletes it. A restarted
// kubelet repairs all of it, without help of the registrar. There is no garbage collector here.
func TestNodeDeletedAndCreatedAgain(t *testing.T) {
	c := start(t)
	c.n.AddDriver(nodeDriver).Start()
	daemon := c.n.StartDaemon()
	daemon.WaitState(nodeDriver, "registered", time.Minute)
	first := c.nodeUID()
	c.awaitCSINode("after the start", first)

	c.deleteNode()
	c.deleteCSINode()
	c.reregister()
	daemon.WaitStatus(nodeDriver, "refused for want of a Node", time.Minute, func(s harness.DriverStatus) bool {
		return s.State == "refused" && strings.Contains(s.KubeletError, `nodes "`+nodeName+`" not found`)
	})

	_, err := c.API.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	c.must(err)
	daemon.WaitState(nodeDriver, "registered", 3*time.Minute)
	c.awaitCSINode("with a Node that the kubelet did not create", first)

	before := daemon.Driver(nodeDriver).Republications
	c.restartKubelet(func() {})
	c.awaitCSINode("after a restart of the kubelet", c.nodeUID())
	c.restartKubelet(c.deleteNode)
	c.awaitCSINode("after a restart of the kubelet without a Node", c.nodeUID())
	if s := daemon.Driver(nodeDriver); s.Republications != before || s.State != "registered" {
		t.Errorf("the driver is %s after %d republications, want registered after %d", s.State, s.Republications, before)
	}

	c.deleteCSINode()
	c.reregister()
	c.awaitCSINode("after reregister, with the CSINode deleted alone", c.nodeUID())
}

func (c *cluster) deleteNode() {
	c.t.Helper()
	c.must(c.API.CoreV1().Nodes().Delete(c.t.Context(), nodeName, metav1.DeleteOptions{}))
}

func (c *cluster) deleteCSINode() {
	c.t.Helper()
	c.must(c.API.StorageV1().CSINodes().Delete(c.t.Context(), nodeName, metav1.DeleteOptions{}))
}

func (c *cluster) reregister() {
	c.t.Helper()
	if _, stderr, code := c.n.RunCommand("reregister", nodeDriver, "--config-root", c.n.Etc); code != 0 {
		c.t.Fatalf("reregister: exit code %d\n%s", code, stderr)
	}
}

// restartKubelet kills the kubelet, calls a function and starts the kubelet again.
func (c *cluster) restartKubelet(between func()) {
	c.t.Helper()
	c.killKubelet()
	between()
	c.startKubelet()
}

// nodeUID waits until the Node exists and returns its UID.
func (c *cluster) nodeUID() (uid types.UID) {
	c.t.Helper()
	harness.Eventually(c.t, time.Minute, "there is a Node", func() string {
		n, err := c.API.CoreV1().Nodes().Get(c.t.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		uid = n.UID
		return ""
	})
	return uid
}

// awaitCSINode waits until the CSINode has the owner and the driver.
func (c *cluster) awaitCSINode(when string, owner types.UID) {
	c.t.Helper()
	harness.Eventually(c.t, time.Minute, "the CSINode has owner and driver "+when, func() string {
		n, err := c.API.StorageV1().CSINodes().Get(c.t.Context(), nodeName, metav1.GetOptions{})
		switch {
		case err != nil:
			return err.Error()
		case len(n.OwnerReferences) != 1 || n.OwnerReferences[0].UID != owner:
			return "its owner is another one"
		case len(n.Spec.Drivers) != 1 || n.Spec.Drivers[0].Name != nodeDriver:
			return "it does not have the driver"
		}
		return ""
	})
}
