package system

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

const (
	unit     = "csi-registrar.service"
	socket   = "csi-registrar.socket"
	registry = "/var/lib/kubelet/plugins_registry"
	// soon is the limit for what the kubelet does once a second; generous, for machines under load.
	soon = 2 * time.Minute
)

// sampleDrivers are the drivers of a node, each a unit csi-sample@NAME.
var sampleDrivers = []string{"one.sample.csi", "two.sample.csi"}

// node is a machine with csi-registrar, installed as by its package, drivers and a kubelet.
type node struct {
	*nspawn.Machine
	t       testing.TB
	drivers []string // the names of the drivers to be registered
}

// install installs files at the same paths as the packages.
func install(t testing.TB, m *nspawn.Machine) {
	t.Helper()
	root := built.Root(t)
	put := func(from, to string, mode os.FileMode) {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		m.WriteMode(to, string(b), mode)
	}
	put(built.Registrar(t), "/usr/bin/csi-registrar", 0o755)
	put(built.SampleDriver(t), "/usr/bin/csi-sample-driver", 0o755)
	put(filepath.Join(root, "packaging", "csi-registrar.catalog"), "/usr/lib/systemd/catalog/csi-registrar.catalog", 0o644)
	put(filepath.Join(root, "systemd", "csi-registrar.tmpfiles"), "/usr/lib/tmpfiles.d/csi-registrar.conf", 0o644)
	copied := m.Path("/usr/lib/csi-registrar/kubelet") // by systemd-tmpfiles
	if err := errors.Join(os.MkdirAll(copied, 0o750), os.Chmod(copied, 0o750), os.Chmod(filepath.Dir(copied), 0o755)); err != nil {
		t.Fatal(err)
	}
	put(filepath.Join(root, "systemd", "csi-registrar.preset"), "/usr/lib/systemd/system-preset/80-csi-registrar.preset", 0o644)
	put(filepath.Join(root, "systemd", "csi-registrar-.service.d", "sandbox.conf"),
		"/usr/lib/systemd/system/csi-registrar-.service.d/sandbox.conf", 0o644)
	for _, name := range []string{"csi-drivers.target", unit} {
		put(filepath.Join(root, "systemd", "before-kubelet.conf"), "/usr/lib/systemd/system/"+name+".d/before-kubelet.conf", 0o644)
	}
	for _, kind := range []string{"*.service", "*.socket", "*.target"} {
		units, err := filepath.Glob(filepath.Join(root, "systemd", kind))
		if err != nil || len(units) == 0 {
			t.Fatal("no units", err)
		}
		for _, from := range units {
			put(from, "/usr/lib/systemd/system/"+filepath.Base(from), 0o644)
		}
	}
}

const driverUnit = `[Unit]
Description=Sample CSI driver %i
[Service]
ExecStart=/usr/bin/csi-sample-driver --socket /run/csi-%i/csi.sock --name %i --node-id node-1 --data /run/csi-%i/volumes
RuntimeDirectory=csi-%i
[Install]
WantedBy=multi-user.target
`

// The kubelet's unit first records the contents of the registry, and the registration code appends
// what it sees.
const kubeletUnit = `[Unit]
Description=The kubelet's own registration code
StartLimitIntervalSec=0
[Service]
ExecStartPre=/bin/sh -c 'cd ` + registry + ` && for s in *-reg.sock; do [ ! -e "$s" ] || stat -c "%%n %%Z" "$s"; done >>/var/log/found || true'
ExecStart=/w/kubelet --root /var/lib/kubelet --node node-1 --state /var/lib/kubelet-state.json
StandardOutput=append:/var/log/kubelet.jsonl
[Install]
WantedBy=multi-user.target
`

func driverConfig(name string) string {
	return fmt.Sprintf("[driver.%q]\nsocket = \"/run/csi-%s/csi.sock\"\n", name, name)
}

// newNode makes a node that is switched off, with everything enabled.
func newNode(t *testing.T, suite string) *node {
	t.Helper()
	n := emptyNode(t, suite)
	n.drivers = slices.Clone(sampleDrivers)
	n.Write("/usr/lib/systemd/system/csi-sample@.service", driverUnit)
	enable := []string{"systemctl", "enable"}
	for _, name := range n.drivers {
		n.Write("/etc/csi-registrar/conf.d/20-"+name+".toml", driverConfig(name))
		enable = append(enable, "csi-sample@"+name+".service")
	}
	n.Chroot(enable...)
	return n
}

// emptyNode makes a node without drivers.
func emptyNode(t *testing.T, suite string) *node {
	t.Helper()
	n := &node{Machine: nspawn.New(t, suite), t: t}
	install(t, n.Machine)
	n.Args = append(n.Args, "--bind-ro="+kubeletDir(t)+":/w")
	n.Write("/usr/lib/systemd/system/kubelet.service", kubeletUnit)
	n.Chroot("systemctl", "enable", unit, "kubelet.service")
	return n
}

// registeredNode makes a node, boots it and waits until the kubelet has registered its drivers.
func registeredNode(t *testing.T, suite string) *node {
	t.Helper()
	n := newNode(t, suite)
	n.Boot()
	n.registered(0)
	return n
}

// event is a line of output of cmd/kubelet.
type event struct {
	Time   time.Time `json:"time"`
	Event  string    `json:"event"`
	Driver string    `json:"driver"`
	Error  string    `json:"error"`
}

func (e event) String() string {
	return e.Time.Format("05.000 ") + e.Event + " " + e.Driver + " " + e.Error
}

// events returns everything that the kubelets saw, except their writes of objects. The machine may
// be off.
func (n *node) events() []event {
	n.t.Helper()
	var all []event
	lines := bufio.NewScanner(strings.NewReader(n.Read("/var/log/kubelet.jsonl")))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			continue // incomplete: the power was cut, or it is being written
		}
		if e.Event == "register" || e.Event == "deregister" || e.Event == "started" {
			all = append(all, e)
		}
	}
	return all
}

// mark returns the current position in the events.
func (n *node) mark() int { return len(n.events()) }

// registered waits until a kubelet has registered each driver without an error, after a mark.
func (n *node) registered(mark int) {
	n.t.Helper()
	for _, name := range n.drivers {
		n.Eventually(soon, "the registration of "+name, func() error {
			events := n.events()[mark:]
			if !slices.ContainsFunc(events, func(e event) bool { return e.Event == "register" && e.Driver == name && e.Error == "" }) {
				return fmt.Errorf("the kubelet saw %v", events)
			}
			return nil
		})
	}
	n.waited()
}

// waited waits until the daemon reports that all drivers are registered.
func (n *node) waited() {
	n.t.Helper()
	if out, err := n.Try(append([]string{"csi-registrar", "wait", "--timeout", "55s"}, n.drivers...)...); err != nil {
		n.t.Fatalf("%s: not registered: %v\n%s", n.Suite, err, out)
	}
}

func (n *node) status() string {
	out, err := n.Try("csi-registrar", "status")
	return fmt.Sprintf("status (%v):\n%s", err, out)
}

// quiet checks that the kubelet has seen nothing since a mark, and sees nothing in the next two
// iterations of its loop.
func (n *node) quiet(mark int) {
	n.t.Helper()
	time.Sleep(2500 * time.Millisecond) // wait, to see that nothing happens
	if events := n.events()[mark:]; len(events) > 0 {
		n.t.Errorf("%s: the kubelet saw %v, want nothing", n.Suite, events)
	}
}

func regSocket(name string) string { return registry + "/" + name + "-reg.sock" }

// inodes returns the inode numbers of the registration sockets; 0 for a missing one.
func (n *node) inodes() map[string]uint64 {
	n.t.Helper()
	all := map[string]uint64{}
	for _, name := range n.drivers {
		var st syscall.Stat_t
		err := syscall.Lstat(n.Path(regSocket(name)), &st)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			n.t.Fatal(err)
		}
		all[name] = st.Ino
	}
	return all
}

// files returns the names in the plugin registry.
func (n *node) files() []string {
	n.t.Helper()
	entries, err := os.ReadDir(n.Path(registry))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// show reads a property of the unit.
func (n *node) show(unit, property string) string {
	n.t.Helper()
	return strings.TrimSpace(n.Run("systemctl", "show", "--value", "--property="+property, unit))
}

// awaitState waits until the unit is in one of the states that `systemctl is-active` prints.
func (n *node) awaitState(unit string, states ...string) {
	n.t.Helper()
	n.Eventually(soon, unit+" to be "+strings.Join(states, " or "), func() error {
		out, _ := n.Try("systemctl", "is-active", unit) // exits 3 for all but active
		if state := strings.TrimSpace(out); !slices.Contains(states, state) {
			return fmt.Errorf("it is %s", state)
		}
		return nil
	})
}

// prober connects to the registration sockets repeatedly, as a kubelet might at any time.
type prober struct {
	stop    chan struct{}
	done    sync.WaitGroup
	mu      sync.Mutex
	probes  int
	refused []error
}

// probe starts to probe each socket 5 times a second: while a daemon hangs until the watchdog ends
// it, it does not answer, and its queue has room for 128 connections.
func (n *node) probe() *prober {
	k := &prober{stop: make(chan struct{})}
	for _, name := range n.drivers {
		path := n.Path(regSocket(name))
		k.done.Go(func() {
			tick := time.NewTicker(200 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-k.stop:
					return
				case <-tick.C:
				}
				c, err := net.Dial("unix", path)
				k.mu.Lock()
				k.probes++
				if err != nil {
					k.refused = append(k.refused, err)
				}
				k.mu.Unlock()
				if err == nil {
					c.Close()
				}
			}
		})
	}
	n.t.Cleanup(k.end)
	return k
}

func (k *prober) end() {
	select {
	case <-k.stop:
	default:
		close(k.stop)
	}
	k.done.Wait()
}

// neverRefused ends the probing and checks that no connection was refused.
func (k *prober) neverRefused(t testing.TB) {
	t.Helper()
	k.end()
	if len(k.refused) > 0 || k.probes == 0 {
		t.Errorf("%d of %d connections were refused: %v", len(k.refused), k.probes, errors.Join(k.refused[:min(3, len(k.refused))]...))
	}
}
