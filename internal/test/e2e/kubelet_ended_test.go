package e2e

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
)

// The status shows that the kubelet has ended, or was started with another root directory, until a
// kubelet confirms the registration, also after restarts of the daemon. It costs no write.
func TestTheEndOfTheKubeletIsShown(t *testing.T) {
	t.Parallel()
	n, d, m, c, k := registeredViaStore(t, "a.example")
	// The daemon notices it within milliseconds, but the machine may be slow.
	const within = 20 * time.Second
	ended := func(s harness.DriverStatus) bool {
		return s.State == "registered" && strings.Contains(s.Reason, "that confirmed this ended ") && strings.HasSuffix(s.Reason, "none has asked since")
	}
	k.Kill()
	c.WaitStatus(d.Name, "that the kubelet ended", within, ended)
	harness.Eventually(t, soon, "STATUS=", func() string {
		if line := m.State().Status; !strings.Contains(line, "; the kubelet (pid ") || !strings.Contains(line, ") ended at ") {
			return line
		}
		return ""
	})
	// The registration counts: wait returns, and status is successful.
	for _, command := range []string{"wait", "status"} {
		out, err := n.Command(command, "--config-root", n.Etc).CombinedOutput()
		if err != nil || command == "status" && !strings.Contains(string(out), "ended") {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
	}
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		c = m.Restart(c, signal)
		c.WaitStatus(d.Name, "that the kubelet ended", within, ended)
	}

	// Started with another root directory, which csi-registrar does not serve.
	other := harness.New(t).StartKubelet()
	c.WaitStatus(d.Name, "that the kubelet ended", within, ended)
	other.Kill()

	k = n.StartKubelet()
	k.Registered(0, d.Name, soon)
	c.WaitStatus(d.Name, "registered without a reason", within, func(s harness.DriverStatus) bool {
		return s.State == "registered" && s.Reason == ""
	})
	answered(k)
	// The next daemon follows a running kubelet.
	c = m.Restart(c, syscall.SIGKILL)
	if csiNode, _ := k.Writes(); csiNode != 0 {
		t.Errorf("%d writes of CSINode, want none", csiNode)
	}
	k.Kill()
	c.WaitStatus(d.Name, "that the kubelet ended", within, ended)
}
