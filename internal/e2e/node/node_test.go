package node_test

import (
	"testing"
	"time"

	"csi-registrar/internal/e2e/built"
	"csi-registrar/internal/e2e/node"
)

func TestMain(m *testing.M) { built.Main(m) }

// TestPodOnAWholeNode: from power-on to a pod that writes to its volume.
func TestPodOnAWholeNode(t *testing.T) {
	for _, suite := range node.Suites {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			n := node.New(t, suite)
			n.Install("0.1.99", "csi-registrar", "csi-sample-driver")
			start := time.Now()
			n.Boot()
			t.Logf("booted after %s", time.Since(start))
			n.Registered()
			t.Logf("registered after %s", time.Since(start))
			n.CreateVolume("data")
			posted := time.Now()
			n.CreatePod(node.Writer("writer", "data"))
			n.Running("writer")
			t.Logf("pod ready %s after it was posted", time.Since(posted))
			n.DeletePod("writer")
		})
	}
}
