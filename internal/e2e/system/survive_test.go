package system

import (
	"maps"
	"testing"
)

func TestBoot(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		before := n.inodes()
		mark := n.mark()
		n.Run("systemctl", "restart", unit)
		n.waited()
		n.quiet(mark)
		if after := n.inodes(); !maps.Equal(before, after) {
			t.Errorf("%v -> %v", before, after)
		}
		t.Log(n.Run("systemctl", "status", unit))
		t.Log(n.status(), n.events(), n.Run("systemd-analyze"), n.Journal())
	})
}
