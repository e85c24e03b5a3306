package node_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/node"
)

const manyUnit = `[Unit]
Description=Sample CSI driver %i of many
Before=kubelet.service
[Service]
ExecStart=/usr/bin/csi-sample-driver --socket /run/csi-many-%i/csi.sock --name d%i.example --data /run/csi-many-%i/volumes --max-volumes %i --topology example/zone=1
RuntimeDirectory=csi-many-%i
[Install]
WantedBy=multi-user.target
`

// TestTwentyDriversTwentyRestarts registers twenty drivers with a real API server, restarts the
// daemon twenty times, by systemd and by SIGKILL, and kills the kubelet, without a single write of
// the CSINode.
func TestTwentyDriversTwentyRestarts(t *testing.T) {
	t.Parallel()
	n := node.New(t, "trixie")
	n.Install(newer, "csi-registrar", "csi-sample-driver")
	n.Chroot("rm", "/usr/lib/csi-registrar/conf.d/20-sample.toml")
	n.Write("/usr/lib/systemd/system/csi-many@.service", manyUnit)
	enable := []string{"systemctl", "enable"}
	for i := 1; i <= 20; i++ {
		n.Write(fmt.Sprintf("/etc/csi-registrar/conf.d/%d.toml", i), fmt.Sprintf("[driver.\"d%d.example\"]\nsocket = \"/run/csi-many-%d/csi.sock\"\n", i, i))
		enable = append(enable, fmt.Sprintf("csi-many@%d.service", i))
	}
	n.Chroot(enable...)
	writes := n.WatchWrites(t)
	n.Boot()
	n.KubeletHealthy()
	n.Registered()

	csiNode, err := n.Cluster.API.StorageV1().CSINodes().Get(t.Context(), node.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	limits := map[string]int32{}
	for _, d := range csiNode.Spec.Drivers {
		if d.NodeID != node.Name || len(d.TopologyKeys) != 1 || d.Allocatable == nil {
			t.Errorf("CSINode has %+v", d)
			continue
		}
		limits[d.Name] = *d.Allocatable.Count
	}
	for i := 1; i <= 20; i++ {
		if got := limits[fmt.Sprintf("d%d.example", i)]; got != int32(i) {
			t.Errorf("CSINode has %d volumes for driver %d", got, i)
		}
	}

	time.Sleep(quiet) // the watch sees what was written
	began := time.Now()
	for i := range 20 {
		if i%2 == 0 {
			n.Run("systemctl", "restart", unit)
		} else {
			n.Run("systemctl", "kill", "--kill-who=main", "--signal=KILL", unit)
			n.Eventually(soon, "the daemon to be back", func() error {
				_, err := n.Try("systemctl", "is-active", unit)
				return err
			})
		}
		n.Registered()
	}
	time.Sleep(quiet)
	if csiNode, ofNode := writes.Count("CSINode", began), writes.Count("Node", began); csiNode+ofNode != 0 {
		t.Errorf("20 restarts wrote the CSINode %d times and the Node %d times", csiNode, ofNode)
	}

	// With the packages of another commit, built by scripts/packages: downgrade, and upgrade again.
	if dir := os.Getenv("DOWNGRADE"); dir != "" {
		began := time.Now()
		before := n.Run("csi-registrar", "version")
		n.InstallFrom(dir)
		if after := n.Run("csi-registrar", "version"); after == before {
			t.Errorf("the version is %s as before", after)
		}
		n.Registered()
		n.Install(newer, "csi-registrar")
		n.Registered()
		time.Sleep(quiet)
		csiNode, ofNode := writes.Count("CSINode", began), writes.Count("Node", began)
		if csiNode+ofNode != 0 {
			t.Errorf("a downgrade and an upgrade wrote the CSINode %d times and the Node %d times", csiNode, ofNode)
		}
		t.Logf("a downgrade and an upgrade with 20 drivers: %d writes of the CSINode, %d of the Node", csiNode, ofNode)
	}

	killed := time.Now()
	n.Run("systemctl", "kill", "--signal=KILL", "kubelet.service")
	n.Eventually(soon, "the new kubelet to ask for all", func() error {
		var status struct {
			Drivers []struct {
				State         string    `json:"state"`
				LastGetInfoAt time.Time `json:"last_get_info_at"`
			}
		}
		if err := json.Unmarshal([]byte(n.Run("csi-registrar", "status", "--json")), &status); err != nil {
			return err
		}
		asked := 0
		for _, d := range status.Drivers {
			if d.State == "registered" && d.LastGetInfoAt.After(killed) {
				asked++
			}
		}
		if asked != 20 {
			return fmt.Errorf("%d so far", asked)
		}
		return nil
	})
	time.Sleep(quiet)
	if strings.Contains(n.Run("journalctl", "--quiet", "--unit=kubelet.service"), orphaned) {
		t.Log("the kubelet deleted the CSINode, not knowing its Node yet")
		return
	}
	if got := writes.Count("CSINode", killed); got != 0 {
		t.Errorf("the kubelet's restart wrote the CSINode %d times", got)
	}
}
