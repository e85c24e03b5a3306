package e2e

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
)

var long = flag.Bool("long", false, "wait as long as the contract says, not a shorter time that shows the same")

func TestMain(m *testing.M) { harness.Main(m) }

// soon is the limit for what the kubelet does once a second; generous, for machines under load.
const soon = 20 * time.Second

// span returns the time to wait in a short or a long run.
func span(short, full time.Duration) time.Duration {
	if *long {
		return full
	}
	return short
}

// registered makes a node on which one driver is registered.
func registered(t *testing.T, name string, extra ...string) (*harness.Node, *harness.Driver, *harness.Daemon, *harness.Kubelet) {
	t.Helper()
	n := harness.New(t)
	d := n.AddDriver(name, extra...)
	d.Start()
	k := n.StartKubelet()
	c := n.StartDaemon()
	k.Registered(0, name, soon)
	c.WaitState(name, "registered", soon)
	return n, d, c, k
}

// registeredViaStore is registered with a service manager that keeps descriptors. The kubelet has
// received its answer, and is recorded.
func registeredViaStore(t *testing.T, name string) (*harness.Node, *harness.Driver, *harness.Manager, *harness.Daemon, *harness.Kubelet) {
	t.Helper()
	n := harness.New(t)
	d := n.AddDriver(name)
	d.Start()
	k := n.StartKubelet()
	m := n.Manager()
	c := m.StartDaemon()
	k.Registered(0, name, soon)
	c.WaitState(name, "registered", soon)
	answered(k)
	kubeletKept(t, n)
	return n, d, m, c, k
}

// kubeletKept waits until the daemon has recorded the kubelet's process.
func kubeletKept(t *testing.T, n *harness.Node) {
	t.Helper()
	record := filepath.Join(n.Etc, "run/csi-registrar/state/kubelet.json")
	harness.Eventually(t, soon, "the record of the kubelet", func() string {
		if _, err := os.Stat(record); err != nil {
			return err.Error()
		}
		return ""
	})
}

// answered waits until the kubelet has the answer to its last call. The daemon records the call
// before it answers; if it is killed in between, the kubelet tries again, rightly.
func answered(k *harness.Kubelet) {
	k.Quiet(k.Mark(), 200*time.Millisecond) // no event reports it; it takes microseconds
}

// unchanged runs a step and checks that the kubelet did not write anything because of it, and that
// the registration socket is still the same.
func unchanged(t *testing.T, n *harness.Node, k *harness.Kubelet, names []string, step func()) {
	t.Helper()
	answered(k)
	inodes := map[string]uint64{}
	for _, name := range names {
		inodes[name] = n.Inode(n.RegSocket(name))
	}
	mark := k.Mark()
	csiNode, node := k.Writes()
	step()
	k.Quiet(mark, 2500*time.Millisecond) // two turns of the kubelet's loop
	csiNode2, node2 := k.Writes()
	if csiNode2 != csiNode || node2 != node {
		t.Errorf("%d writes of CSINode and %d of Node, want none", csiNode2-csiNode, node2-node)
	}
	for _, name := range names {
		if ino := n.Inode(n.RegSocket(name)); ino != inodes[name] {
			t.Errorf("the registration socket of %s is another one: inode %d, was %d", name, ino, inodes[name])
		}
	}
}

// contains fails the test if a text does not contain all of the words.
func contains(t *testing.T, what, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%s does not say %q: %s", what, w, text)
		}
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func numbered(format string, n int) []string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf(format, i))
	}
	return names
}
