package e2e

import (
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/harness"
)

var unusualNames = map[string]string{
	"capitals": "Foo.Example",
	"longest":  strings.Repeat("a", 59) + ".com",
}

// startNamed starts `run` with node-driver-registrar's flags, so that the driver reports its name.
func startNamed(n *harness.Node, socket string) *harness.Daemon {
	return n.StartWithFlags("--csi-address", socket, "--kubelet-registration-path", socket, "--plugin-registration-path", n.Registry())
}

func TestUnusualNamesRegisterThroughFlags(t *testing.T) {
	t.Parallel()
	for what, name := range unusualNames {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.DriverAt(name, n.Run+"/it.sock")
			d.Start()
			k := n.StartKubelet()
			startNamed(n, d.Socket)
			k.Registered(0, name, soon)
		})
	}
}
