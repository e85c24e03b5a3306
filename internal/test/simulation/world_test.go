package simulation

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
)

// world is a node: the real daemon among models. Its lock guards all models.
type world struct {
	mu      sync.Mutex
	began   time.Time
	files   *files
	passed  map[*os.File]*sock // descriptors that PID 1 passed, which are no real ones
	conns   [256]*conn
	kubelet *kubeletModel
	drivers []*csiDriver
	pid1    pid1
	admin   *admin
	process *process // the daemon that runs; nil: none

	connections, processes int
	shortage               bool   // the next file cannot be opened
	cookies                uint64 // of sockets
	wrongs                 int    // entries of all wrongSince
	ended                  []*process
	movesBack              bool // root_dir has changed for a moment
	// the driver whose next socket is removed before its file is looked at
	removesAtOnce string
	// the wall clock is set by so much before the next process starts
	clockStep            time.Duration
	opensAt              time.Time // noSockets, or the shortage, ended
	noSockets            bool      // agent.Parts cannot make one: there are no descriptors
	undamagedSince       time.Time
	freeSince            time.Time
	intactSince          time.Time // only drivers and kubelet hinder the daemon since; zero: more
	eventAt              time.Time
	faultAt              time.Time // when the one call failed
	damagedAt, foreignAt time.Time // when something was in the way of the daemon
	besidesAt            time.Time // when another registrar was at another path
	known                map[string]*history
	violation            string
	over                 bool // nothing is started any more
	seen                 *coverage
	failed               map[string]bool // paths that could not be changed
	lost                 map[string]bool // files that an earlier process could not remove
	story                []string        // nil: nobody wants it
}

var driverNames = []string{"a.example", "b.example"}

// history is what happened to a driver's registration.
type history struct {
	reregistered int
	unseen       bool      // the last limit came while the daemon may not have seen the one before
	learnedAt    time.Time // when the kubelet had the driver's limit last from the driver
	newsAt       time.Time // when the kubelet had to learn something, or its table changed
	rootAt       time.Time // when root_dir was changed
	unwantedAt   time.Time // when it was to be withdrawn
	unmountAt    time.Time // until when its volumes are in use
	calledAt     time.Time // when reregister was called
	requestedAt  time.Time // when the last reregister that the daemon accepted was called
	acceptedAt   time.Time // when that returned
	asking       int       // calls of reregister that have not returned
	told         *sock     // on which the kubelet last said what became of the registration
	movedAt      time.Time
	last         *sock     // that was published
	cameAt       time.Time // when another program took the path
	// when another program that had the path for a second left it; zero: the daemon removed the
	// file
	leftAt     time.Time
	table      config.Driver // in force, of the process tableOf
	tableOf    *process
	tableUntil time.Time // when the one before was in force; zero: there was none
	checkedAt  time.Time
	wrongSince map[[2]string]time.Time
}

// coverage counts what was reached.
type coverage struct {
	causes, states map[string]int
	events         int
}

func (w *world) of(driver string) *history {
	if w.known[driver] == nil {
		w.known[driver] = &history{wrongSince: map[[2]string]time.Time{}}
	}
	return w.known[driver]
}

func newWorld(seed uint64, seen *coverage) *world {
	w := &world{began: time.Now(), passed: map[*os.File]*sock{}, known: map[string]*history{}, seen: seen, failed: map[string]bool{}, lost: map[string]bool{}}
	w.pid1.held = map[string][]*sock{}
	w.admin = &admin{w: w, root: rootDirs[0], tables: map[string]*config.Driver{}}
	w.kubelet = newKubelet(w, seed%2 == 0 || seed%16 == 13)
	w.files = newFiles(w)
	// Where calls take their time, events come in between. Some disks are almost too slow.
	latencies := []time.Duration{0, 0, 0, 0, 300 * time.Microsecond, 300 * time.Microsecond, 20 * time.Millisecond, 20 * time.Millisecond, 250 * time.Millisecond}
	w.files.latency = latencies[seed%uint64(len(latencies))]
	for i, name := range driverNames {
		d := &csiDriver{w: w, name: name, socket: "/r/" + name + ".sock", state: "down", changed: make(chan struct{}), generation: 1}
		d.id = status.Identity{Name: name, Version: "1", NodeID: "node", Topology: map[string]string{"zone." + name: "x"}}
		w.drivers = append(w.drivers, d)
		c := config.DefaultDriver(name, d.socket)
		if i > 0 {
			c.WhenGone = config.Withdraw
			c.ProbeEvery = time.Minute
		}
		w.admin.tables[name] = &c
	}
	w.kubelet.start()
	return w
}

func (w *world) driver(name string) *csiDriver {
	for _, d := range w.drivers {
		if d.name == name {
			return d
		}
	}
	return nil
}

func (w *world) driverAt(socket string) *csiDriver {
	for _, d := range w.drivers {
		if socket == d.socket || socket == d.otherSocket() {
			return d
		}
	}
	return nil
}

// otherSocket is another path of the same socket.
func (d *csiDriver) otherSocket() string { return d.socket + "2" }

// mustStay is volumeCount.mustStay.
func (w *world) mustStay(driver string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inUse(driver) {
		return "volumes are in use"
	}
	return ""
}

// inUse reports whether volumes of the driver are in use.
func (w *world) inUse(driver string) bool { return time.Now().Before(w.of(driver).unmountAt) }

// place is a driver below a root directory.
type place struct{ root, driver string }

// The paths of drivers, which are needed often.
var (
	registries = map[string]string{} // by root directory
	sockets    = map[place]string{}
	sidecars   = map[place]string{}
	records    = map[string]string{} // by driver
	storeNames = map[string]string{} // by driver
)

func init() {
	for _, root := range rootDirs {
		registries[root] = rootdir.PluginsRegistry(root)
	}
	for _, driver := range driverNames {
		for _, root := range rootDirs {
			at := place{root, driver}
			sockets[at] = registries[root] + "/" + rootdir.SocketName(driver)
			sidecars[at] = registries[root] + "/sidecar-" + driver + ".sock"
		}
		records[driver] = runDir + "/registrations/" + driver + ".json"
		storeNames[driver] = regsocket.StorePrefix + driver
	}
}

func socketIn(root, driver string) string { return sockets[place{root, driver}] }
func recordOf(driver string) string       { return records[driver] }
func storeName(driver string) string      { return storeNames[driver] }

// registry and socketOf are below the root_dir in the files.
func (w *world) registry() string              { return registries[w.admin.root] }
func (w *world) socketOf(driver string) string { return socketIn(w.admin.root, driver) }

func driverOf(socket string) string {
	driver, _ := rootdir.DriverName(path.Base(socket))
	return driver
}

// tell adds a line to the story.
func (w *world) tell(format string, args ...any) {
	if w.story != nil {
		w.story = append(w.story, fmt.Sprintf("%12s  ", time.Since(w.began))+fmt.Sprintf(format, args...))
	}
}

// violated notes the first thing that must never be.
func (w *world) violated(rule, format string, args ...any) {
	if w.violation == "" {
		w.violation = rule + ": " + fmt.Sprintf(format, args...)
		w.tell("VIOLATION %s", w.violation)
	}
}

// removedByDaemon checks that nothing of others is removed, except sockets on which nobody listens,
// and of these none that only a disabled table names.
func (w *world) removedByDaemon(p *process, name string, n *node) {
	stale := n.mode&syscall.S_IFMT == syscall.S_IFSOCK && (n.sock == nil || n.sock.refs == 0)
	driver := driverOf(name)
	inForce := !w.disturbed(p) && !w.admin.broken && time.Since(w.admin.editedAt) > 2*patience+5*time.Second
	if table := w.admin.tables[driver]; inForce && table != nil && !table.Enabled && w.of(driver).unwantedAt.Before(p.started) {
		stale = stale && (p.handed[driver] || w.files.nodes[recordOf(driver)] != nil)
	}
	if n.maker != "daemon" && !stale {
		w.violated("nothing of others is removed", "process %d removes %s of %s", p.number, name, n.maker)
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}
