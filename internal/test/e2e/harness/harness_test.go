package harness_test

import (
	"fmt"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

func TestMain(m *testing.M) { harness.Main(m) }

// The counters themselves, with the fake sidecar: each of its restarts costs as much as one of
// node-driver-registrar, two writes of the CSINode and two of the Node.
func TestSidecarRestartsChurn(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.NewDriver("a.example")
	d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "1"}; b.MaxVolumes = 7 })
	d.Start()
	k := n.StartKubelet()
	s := n.StartSidecar(d.Socket)
	k.Registered(0, "a.example", 10*time.Second)
	got := k.CSINode()["a.example"]
	if got.NodeID != "id-of-a.example" || got.MaxVolumes != 7 || len(got.TopologyKeys) != 1 {
		t.Errorf("CSINode has %+v", got)
	}
	csiNode, node := k.Writes()
	for range 3 {
		mark := k.Mark()
		s.Stop()
		k.Deregistered(mark, "a.example", 10*time.Second)
		s = n.StartSidecar(d.Socket)
		k.Registered(mark, "a.example", 10*time.Second)
	}
	csiNode2, node2 := k.Writes()
	if csiNode2-csiNode != 6 || node2-node != 6 {
		t.Errorf("3 restarts of a sidecar: %d writes of CSINode and %d of Node, want 6 and 6", csiNode2-csiNode, node2-node)
	}
}

// The fake API server refuses the same objects as the real one.
func TestRefusalsAreReal(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	k := n.StartKubelet()
	for name, ok := range map[string]bool{"Foo.Example": true, "Under_score!": false, "a b": false} {
		d := n.NewDriver(name)
		d.Start()
		n.SidecarAt(n.RegSocket(name), name, d.Socket)
		if ok {
			k.Registered(0, name, 10*time.Second)
		} else {
			k.Refused(0, name, 10*time.Second)
		}
	}
	// A changed topology value, while the Node has the old label.
	k.Command("label example/zone=1")
	d := n.NewDriver("zone.example")
	d.Set(func(b *fake.Answers) { b.Topology = map[string]string{"example/zone": "2"} })
	d.Start()
	n.StartSidecar(d.Socket)
	k.Refused(0, "zone.example", 10*time.Second)
	k.Command("label example/zone=")
	k.Registered(0, "zone.example", 15*time.Second)
}

// A kubelet that was killed finds the objects of the one before.
func TestKubeletsShareAnAPIServer(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.NewDriver("a.example")
	d.Start()
	s := n.StartSidecar(d.Socket)
	k := n.StartKubelet()
	k.Registered(0, "a.example", 10*time.Second)
	told(t, s, 1) // the notification follows the event; do not kill the kubelet in between
	k.Kill()
	k = n.StartKubelet()
	k.Registered(0, "a.example", 10*time.Second)
	if csiNode, node := k.Writes(); csiNode+node != 0 {
		t.Errorf("the second kubelet wrote the CSINode %d times and the Node %d times, want none", csiNode, node)
	}
	told(t, s, 2)
}

func told(t *testing.T, s *harness.Sidecar, times int) {
	t.Helper()
	harness.Eventually(t, 5*time.Second, "notifications", func() string {
		said := s.Said()
		if len(said) != times || !said[times-1].PluginRegistered {
			return fmt.Sprintf("the sidecar was told %v, want %d times yes", said, times)
		}
		return ""
	})
}
