package cluster

import (
	"fmt"
	"slices"
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

const (
	limitedDriver = "limited.example"
	// updatePeriod is how often the kubelet asks the driver, the minimum that the API server
	// allows.
	updatePeriod = 10 * time.Second

	// The driver's entry in the CSINode: at first, with the other limit, and after move.
	entryBefore = "id-of-limited.example 5 [example/zone]"
	entryAfter  = "id-of-limited.example 9 [example/zone]"
	entryMoved  = "other 9 [example/rack example/zone]"
)

// newLimited starts a cluster with a driver whose CSIDriver object makes the kubelet update the
// limit itself.
func newLimited(t *testing.T, extra ...string) (*cluster, *harness.Driver) {
	t.Helper()
	c := start(t)
	no, period := false, int64(updatePeriod/time.Second)
	_, err := c.API.StorageV1().CSIDrivers().Create(t.Context(), &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: limitedDriver},
		Spec:       storagev1.CSIDriverSpec{AttachRequired: &no, NodeAllocatableUpdatePeriodSeconds: &period},
	}, metav1.CreateOptions{})
	c.must(err)
	d := c.n.AddDriver(limitedDriver, extra...)
	d.Set(func(a *fake.Answers) { a.MaxVolumes, a.Topology = 5, map[string]string{"example/zone": "1"} })
	d.Start()
	return c, d
}

// entry returns the driver's entry in the CSINode as text, or "" if there is none.
func (c *cluster) entry() string {
	c.t.Helper()
	node, err := c.API.StorageV1().CSINodes().Get(c.t.Context(), nodeName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "" // the kubelet has not created it yet
	}
	c.must(err)
	for _, d := range node.Spec.Drivers {
		if d.Name == limitedDriver && d.Allocatable != nil {
			slices.Sort(d.TopologyKeys)
			return fmt.Sprintf("%s %d %v", d.NodeID, *d.Allocatable.Count, d.TopologyKeys)
		}
	}
	return ""
}

// waitEntry waits for an entry in the CSINode.
func (c *cluster) waitEntry(want string) {
	c.t.Helper()
	harness.Eventually(c.t, killLimit, "the CSINode has "+want, func() string {
		if got := c.entry(); got != want {
			return "it has " + got
		}
		return ""
	})
}

// changeLimit restarts the driver with another limit, and prints the number of writes.
func (c *cluster) changeLimit(d *harness.Driver, writes *csiNodeWrites, name string) {
	c.t.Helper()
	before, missing, began := writes.count(), writes.missing(), time.Now()
	d.Stop()
	d.Set(func(a *fake.Answers) { a.MaxVolumes = 9 })
	d.Start()
	c.waitEntry(entryAfter)
	took := time.Since(began)
	c.entryStays(entryAfter)
	c.t.Logf("| %s | %d | %.1f s | %.1f s |", name, writes.count()-before, (writes.missing() - missing).Seconds(), took.Seconds())
}

// entryStays checks that the CSINode does not change while the kubelet asks the driver again.
func (c *cluster) entryStays(want string) {
	c.t.Helper()
	harness.Never(c.t, updatePeriod+quietTime, "the CSINode changes", func() string {
		if got := c.entry(); got != want {
			return got
		}
		return ""
	})
}

// move restarts the driver with another node ID and an additional topology key.
func move(d *harness.Driver) {
	d.Stop()
	d.Set(func(a *fake.Answers) {
		a.NodeID, a.Topology = "other", map[string]string{"example/zone": "1", "example/rack": "2"}
	})
	d.Start()
}

// TestLimitChanges changes a driver's volume limit where the kubelet updates the CSINode by itself.
func TestLimitChanges(t *testing.T) {
	t.Run("republish", func(t *testing.T) {
		c, d := newLimited(t)
		daemon := c.n.StartDaemon()
		daemon.WaitState(limitedDriver, "registered", killLimit)
		c.waitEntry(entryBefore)
		writes := c.countCSINodeWrites()
		c.changeLimit(d, writes, "republish")
		if s := daemon.WaitState(limitedDriver, "registered", killLimit); s.Republications != 1 || s.MaxVolumes != 9 {
			t.Errorf("%d republications, the limit is %d", s.Republications, s.MaxVolumes)
		}
	})
	t.Run("leave", func(t *testing.T) {
		c, d := newLimited(t, `when_limit_changes = "leave"`)
		daemon := c.n.StartDaemon()
		daemon.WaitState(limitedDriver, "registered", killLimit)
		c.waitEntry(entryBefore)
		writes, socket := c.countCSINodeWrites(), c.n.Inode(c.n.RegSocket(limitedDriver))
		before := writes.count()
		c.changeLimit(d, writes, "leave")
		if n := writes.count() - before; n != 1 {
			t.Errorf("%d writes of the CSINode, want the kubelet's one", n)
		}
		s := daemon.WaitState(limitedDriver, "registered", killLimit)
		if s.Republications != 0 || s.MaxVolumes != 9 || c.n.Inode(c.n.RegSocket(limitedDriver)) != socket {
			t.Errorf("%d republications, the limit is %d", s.Republications, s.MaxVolumes)
		}
		// Values that the kubelet cannot update itself still need a registration.
		move(d)
		c.waitEntry(entryMoved)
	})
}
