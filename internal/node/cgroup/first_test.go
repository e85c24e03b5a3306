package cgroup

import "testing"

// TestFirstUnitOfAPath checks that the unit is the first one in the path: a process may choose the
// names below its own cgroup.
func TestFirstUnitOfAPath(t *testing.T) {
	const text = "0::/system.slice/csi-nfs.service/kubelet.service/x.scope\n"
	if got := Parse(text).Unit; got != "csi-nfs.service" {
		t.Errorf("%q", got)
	}
}
