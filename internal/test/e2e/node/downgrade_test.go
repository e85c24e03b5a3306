package node_test

import (
	"fmt"
	"os"
	"testing"
	"time"

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

// TestDowngrade registers twenty drivers with a real API server, installs another version of the
// daemon and this one again, and expects no write of the CSINode. The other version is of the same
// tree, or in the directory DOWNGRADE, made by scripts/packages of another commit.
func TestDowngrade(t *testing.T) {
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

	time.Sleep(quiet) // the watch sees what was written
	began, before := time.Now(), n.Run("csi-registrar", "version")
	if dir := os.Getenv("DOWNGRADE"); dir != "" {
		n.InstallFrom(dir)
	} else {
		n.Install(older, "csi-registrar")
	}
	if after := n.Run("csi-registrar", "version"); after == before {
		t.Errorf("the version is %s as before", after)
	}
	n.Registered()
	n.Install(newer, "csi-registrar")
	n.Registered()
	time.Sleep(quiet)
	if csiNode, ofNode := writes.Count("CSINode", began), writes.Count("Node", began); csiNode+ofNode != 0 {
		t.Errorf("a downgrade and an upgrade wrote the CSINode %d times and the Node %d times", csiNode, ofNode)
	}
}
