package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/harness"
)

// TestRollout takes three nodes through ways A and B of rollout.md, with the kubelet's own code on
// each: one after the other, the third one from an image without csi-registrar, one on its way
// back, all forward, and all without csi-registrar again. It prints what each step cost. A pod is
// its two processes; TestPolicy (package fleet) tests which containers it has. With DRIVERS=DIR the
// programs csi-node-driver-registrar and hostpathplugin in DIR are used.
func TestRollout(t *testing.T) {
	t.Run("A", func(t *testing.T) {
		t.Parallel()
		r := newRollout(t)
		n1, n2 := r.join("n1"), r.join("n2")
		r.step("pod restarted, node-driver-registrar", n1, 2, func() { n1.restartPod(ndr) })
		for _, n := range []*rolloutNode{n1, n2} {
			r.step("the sidecar becomes csi-registrar, pod restarted", n, 2, func() { n.restartPod(sidecarMode) })
		}
		r.step("installed", n1, 2, n1.install)
		r.step("pod restarted", n1, 0, func() { n1.restartPod(sidecarMode) })
		n3 := r.join("n3") // of an old image
		r.step("installed", n2, 2, n2.install)
		r.step("back: removed", n1, 2, n1.uninstall)
		r.step("installed again", n1, 2, n1.install)
		r.step("node of an old image: the sidecar becomes csi-registrar", n3, 2, func() { n3.restartPod(sidecarMode) })
		r.step("node of an old image: installed", n3, 2, n3.install)
		for _, n := range []*rolloutNode{n1, n2, n3} {
			r.step("uninstalled", n, 2, n.uninstall)
		}
	})
	t.Run("B", func(t *testing.T) {
		t.Parallel()
		r := newRollout(t)
		n1, n2 := r.join("n1"), r.join("n2")
		for _, n := range []*rolloutNode{n1, n2} {
			r.step("installed beside the sidecar", n, 0, n.install)
		}
		r.step("listed, pod restarted", n1, 2, func() { n1.restartPod(none) })
		r.step("pod restarted", n1, 0, func() { n1.restartPod(none) })
		n3 := r.join("n3") // of an old image
		r.step("listed, pod restarted", n2, 2, func() { n2.restartPod(none) })
		for range 5 {
			r.step("pod made again by an operator", n1, 0, func() { n1.restartPod(none) })
		}
		r.step("back: not listed, pod restarted", n1, 2, func() { n1.restartPod(ndr) })
		r.step("pod restarted beside csi-registrar", n1, 2, func() { n1.restartPod(ndr) })
		r.step("listed again, pod restarted", n1, 2, func() { n1.restartPod(none) })
		r.step("node of an old image: installed", n3, 0, n3.install)
		r.step("node of an old image: listed, pod restarted", n3, 2, func() { n3.restartPod(none) })
		for _, n := range []*rolloutNode{n1, n2, n3} {
			r.step("back: not listed, pod restarted", n, 2, func() { n.restartPod(ndr) })
			r.step("uninstalled", n, 0, n.uninstall)
		}
	})
}

const rolloutDriver = "hostpath.csi.k8s.io"

// The sidecars of a pod.
const (
	none        = ""
	ndr         = "node-driver-registrar"
	sidecarMode = "csi-registrar run"
)

// rollout is a cluster that changes node by node.
type rollout struct {
	t     *testing.T
	table strings.Builder
}

func newRollout(t *testing.T) *rollout {
	built.Registrar(t) // first, because it may take a while
	r := &rollout{t: t}
	fmt.Fprint(&r.table, "\n| | node | CSINode writes | missing, s | of that without its driver, s |\n|---|---|---|---|---|\n")
	t.Cleanup(func() { t.Log(r.table.String()) })
	return r
}

// rolloutNode is a node with a kubelet and the driver's pod.
type rolloutNode struct {
	*harness.Node
	name        string
	kubelet     *harness.Kubelet
	socket      string
	manager     *harness.Manager
	daemon      *harness.Daemon
	sidecar     string
	stopSidecar func()
	stopDriver  func()
	down        time.Duration // of the driver, in this step
}

// join adds a node that has no csi-registrar yet.
func (r *rollout) join(name string) *rolloutNode {
	r.t.Helper()
	n := &rolloutNode{Node: harness.New(r.t), name: name}
	n.manager = n.Manager()
	n.kubelet = n.StartKubelet()
	n.socket = filepath.Join(n.Run, "csi.sock")
	n.startPod(ndr)
	n.kubelet.Registered(0, rolloutDriver, time.Minute)
	return n
}

// install starts the daemon with a drop-in.
func (n *rolloutNode) install() {
	n.T.Helper()
	n.Configure(rolloutDriver, n.socket)
	n.daemon = n.manager.StartDaemon()
}

// uninstall stops the daemon for good, as the unit does when the package is removed.
func (n *rolloutNode) uninstall() {
	n.T.Helper()
	n.daemon.Stop()
	n.daemon = nil
	if err := n.manager.Drop(); err != nil {
		n.T.Fatal(err)
	}
	// The answer of `cleanup --ask` in the unit.
	if err := os.WriteFile(filepath.Join(n.Etc, "run/csi-registrar/state/stopped"), nil, 0o700); err != nil {
		n.T.Fatal(err)
	}
	if _, stderr, code := n.RunCommand("cleanup", "--if-stopped", "--config-root", n.Etc); code != 0 {
		n.T.Fatalf("cleanup: %d %s", code, stderr)
	}
}

// startPod starts the driver and a sidecar.
func (n *rolloutNode) startPod(sidecar string) {
	n.T.Helper()
	programs := os.Getenv("DRIVERS")
	process := func(name string, args ...string) func() {
		p := harness.StartProcess(n.T, name, exec.Command(filepath.Join(programs, name), args...))
		return func() { p.End(syscall.SIGTERM, time.Minute) }
	}
	if programs != "" {
		n.stopDriver = process("hostpathplugin", "--drivername="+rolloutDriver, "--endpoint=unix://"+n.socket, "--nodeid="+n.name, "--statedir="+filepath.Join(n.Dir, "state"))
	} else {
		d := n.DriverAt(rolloutDriver, n.socket)
		d.Start()
		n.stopDriver = d.Stop
	}
	harness.Eventually(n.T, time.Minute, "the driver serves", func() string {
		if !harness.Accepts(n.socket) {
			return "not yet"
		}
		return ""
	})
	flags := []string{"--csi-address=" + n.socket, "--kubelet-registration-path=" + n.socket, "--plugin-registration-path=" + n.Registry()}
	n.sidecar = sidecar
	switch {
	case sidecar == none:
		n.stopSidecar = func() {}
	case sidecar == sidecarMode:
		n.stopSidecar = n.StartWithFlags(flags...).Stop
	case programs != "":
		n.stopSidecar = process("csi-node-driver-registrar", flags...)
	default:
		n.stopSidecar = n.StartSidecar(n.socket).Stop
	}
}

// restartPod ends both processes of the pod and starts the next one.
func (n *rolloutNode) restartPod(sidecar string) {
	n.T.Helper()
	n.stopSidecar()
	n.stopDriver()
	began := time.Now()
	n.startPod(sidecar)
	n.down += time.Since(began)
}

// registered reports what is missing until the driver is registered by the right registrar.
func (n *rolloutNode) registered() string {
	n.T.Helper()
	if _, ok := n.kubelet.CSINode()[rolloutDriver]; !ok {
		return "the CSINode does not have it"
	}
	if n.daemon == nil {
		return ""
	}
	want := "registered"
	if n.sidecar == ndr {
		want = "conflict"
	}
	if d := n.daemon.Driver(rolloutDriver); d.State != want {
		return fmt.Sprintf("it is %s (%s), want %s", d.State, d.Reason, want)
	}
	return ""
}

// step changes a node, and checks how often that wrote the CSINode.
func (r *rollout) step(what string, n *rolloutNode, writes int, change func()) {
	r.t.Helper()
	before, _ := n.kubelet.Writes()
	mark := n.kubelet.Mark()
	n.down = 0
	began := time.Now()
	change()
	harness.Eventually(r.t, time.Minute, what+": the driver is registered", n.registered)
	// The kubelet's loop takes a second, and the registration may be the one from before.
	last := time.Now()
	for seen := -1; time.Since(last) < 2500*time.Millisecond; time.Sleep(50 * time.Millisecond) {
		if now := n.kubelet.Mark(); now != seen {
			seen, last = now, time.Now()
		}
	}
	harness.Eventually(r.t, time.Minute, what+": the driver is registered", n.registered)
	after, _ := n.kubelet.Writes()
	missing := time.Duration(0)
	since := began
	has := true
	for _, e := range n.kubelet.Since(mark) {
		if e.Event != "csinode" {
			continue
		}
		if !has {
			missing += e.Time.Sub(since)
		}
		since = e.Time
		has = slices.ContainsFunc(e.Drivers, func(d harness.CSINodeDriver) bool { return d.Name == rolloutDriver })
	}
	fmt.Fprintf(&r.table, "| %s | %s | %d | %.1f | %.1f |\n", what, n.name, after-before, missing.Seconds(), n.down.Seconds())
	if after-before != writes {
		r.t.Errorf("%s on %s: %d writes of the CSINode, want %d", what, n.name, after-before, writes)
	}
	if (missing > 0) != (writes > 0) {
		r.t.Errorf("%s on %s: %s without the driver", what, n.name, missing)
	}
}
