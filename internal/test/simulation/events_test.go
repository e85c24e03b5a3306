package simulation

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"csi-registrar/internal/node/config"
)

// event is something that happens to the node, a while after the event before it.
type event struct {
	after  time.Duration
	kind   string
	driver int
	arg    uint64
}

func (e event) String() string {
	return fmt.Sprintf("%s (driver %d, %d)", e.kind, e.driver, e.arg%100)
}

// kinds are what can happen, with how often.
var kinds = []struct {
	name   string
	weight int
	do     func(w *world, d *csiDriver, arg uint64)
}{
	{"driver goes", 8, func(w *world, d *csiDriver, _ uint64) { d.set("down") }},
	{"driver comes", 20, func(w *world, d *csiDriver, arg uint64) { d.comes(arg%6 == 0) }},
	{"driver is starting", 4, func(w *world, d *csiDriver, _ uint64) { d.set("starting") }},
	{"driver is slow", 3, func(w *world, d *csiDriver, _ uint64) { d.set("slow") }},
	{"driver hangs", 4, func(w *world, d *csiDriver, _ uint64) { d.set("hang") }},
	{"another driver at its path", 3, func(w *world, d *csiDriver, _ uint64) { d.set("other") }},
	{"driver is replaced", 4, func(w *world, d *csiDriver, _ uint64) { d.set(d.state) }},
	{"driver has another version", 2, func(w *world, d *csiDriver, arg uint64) { d.id.Version = fmt.Sprint(arg % 5); d.set("up") }},
	{"driver has another node id", 3, func(w *world, d *csiDriver, arg uint64) {
		d.id.NodeID = fmt.Sprint("node", arg%3)
		w.of(d.name).newsAt = time.Now()
		d.set("up")
	}},
	{"driver has another limit", 2, func(w *world, d *csiDriver, arg uint64) {
		d.id.MaxVolumes = int64(arg % 5)
		// What the kubelet has learned at its start the daemon sees 5 minutes later, if nothing
		// hints at it; see README.md, "Open".
		h := w.of(d.name)
		h.newsAt, h.unseen = time.Now(), w.troubled() || time.Since(h.learnedAt) < 5*time.Minute+patience
		d.set("up")
	}},
	{"driver has another topology value", 1, func(w *world, d *csiDriver, arg uint64) {
		d.id.Topology = map[string]string{"zone." + d.name: string("xy"[arg%2])}
		w.of(d.name).newsAt = time.Now()
		d.set("up")
	}},

	{"kubelet restarts", 8, func(w *world, _ *csiDriver, _ uint64) { w.kubelet.stop(); w.kubelet.start() }},
	{"kubelet stops", 3, func(w *world, _ *csiDriver, _ uint64) { w.kubelet.stop() }},
	{"kubelet starts", 6, func(w *world, _ *csiDriver, _ uint64) {
		if !w.kubelet.running {
			w.kubelet.start()
		}
	}},
	{"API server fails", 4, func(w *world, _ *csiDriver, _ uint64) { w.kubelet.apiErr = "the API server does not answer" }},
	{"API server works", 6, func(w *world, _ *csiDriver, _ uint64) { w.kubelet.apiErr = "" }},

	{"socket removed", 8, func(w *world, d *csiDriver, _ uint64) {
		if w.files.nodes[w.socketOf(d.name)] != nil {
			w.files.lose(w.socketOf(d.name))
		}
	}},
	{"the next socket is removed at once", 2, func(w *world, d *csiDriver, _ uint64) { w.removesAtOnce = d.name }},
	{"plugins_registry removed", 4, func(w *world, _ *csiDriver, _ uint64) { w.removeRegistry() }},
	{"plugins_registry recreated", 2, func(w *world, _ *csiDriver, _ uint64) {
		w.removeRegistry()
		w.files.put(w.registry(), &node{mode: syscall.S_IFDIR | 0o750, maker: "admin"})
	}},
	{"another registrar takes the path", 3, func(w *world, d *csiDriver, arg uint64) { w.sidecar(d, w.socketOf(d.name), arg) }},
	{"another registrar takes the name", 2, func(w *world, d *csiDriver, arg uint64) { w.sidecar(d, w.besides(d), arg) }},
	{"another registrar is killed", 4, func(w *world, d *csiDriver, _ uint64) { w.endSidecars(d, false) }},
	{"another registrar ends", 4, func(w *world, d *csiDriver, _ uint64) { w.endSidecars(d, true) }},
	{"a file takes the path", 2, func(w *world, d *csiDriver, _ uint64) {
		if w.files.nodes[w.registry()] != nil {
			w.replace(w.socketOf(d.name), &node{mode: syscall.S_IFREG, maker: "admin"})
		}
	}},
	{"the file is moved away", 3, func(w *world, d *csiDriver, _ uint64) {
		if n := w.files.nodes[w.socketOf(d.name)]; n != nil && n.maker == "admin" {
			w.files.drop(w.socketOf(d.name))
		}
	}},
	{"record removed", 1, func(w *world, d *csiDriver, _ uint64) {
		if w.files.nodes[recordOf(d.name)] != nil && w.process == nil && w.files.mounts["k"].err == 0 && w.files.mounts["k"].hang == nil {
			w.files.drop(recordOf(d.name)) // it alone names an earlier root_dir
			w.lost[socketIn(other(w.admin.root), d.name)], w.lost[w.socketOf(d.name)] = true, true
		}
	}},
	{"disk is full", 2, func(w *world, _ *csiDriver, _ uint64) {
		w.files.mounts["k"].err, w.files.mounts["k"].spare = syscall.ENOSPC, 0
	}},
	{"disk is read-only", 2, func(w *world, _ *csiDriver, _ uint64) { w.files.mounts["k"].err = syscall.EROFS }},
	{"disk is writable", 8, func(w *world, _ *csiDriver, _ uint64) { w.files.mounts["k"].writable() }},
	{"disk hangs", 3, func(w *world, _ *csiDriver, _ uint64) { w.files.mounts["k"].freeze() }},
	{"one call hangs", 8, func(w *world, _ *csiDriver, arg uint64) { w.files.mounts["k"].freezeOne(int(arg % 12)) }},
	{"one call is slow", 5, func(w *world, _ *csiDriver, arg uint64) {
		m := w.files.mounts["k"]
		if end := m.freezeOne(int(arg % 16)); end != nil {
			go func() {
				time.Sleep(time.Duration(arg%2900) * time.Millisecond)
				w.mu.Lock()
				defer w.mu.Unlock()
				m.thawOne(end)
			}()
		}
	}},
	{"one call fails", 8, func(w *world, _ *csiDriver, arg uint64) {
		m := w.files.mounts["k"]
		m.fault, m.faultIn = []syscall.Errno{syscall.EIO, syscall.EACCES, syscall.ENOMEM, syscall.ENOSPC}[arg%4], int(arg/4%16)
	}},
	{"one call to /run fails", 2, func(w *world, _ *csiDriver, arg uint64) {
		m := w.files.mounts["r"]
		m.fault, m.faultIn = syscall.ENOSPC, int(arg%3)
	}},
	{"disk answers", 12, func(w *world, _ *csiDriver, _ uint64) { w.files.mounts["k"].thaw() }},
	{"no descriptor for a moment, daemon restarts", 2, func(w *world, _ *csiDriver, arg uint64) {
		w.shortage = true
		w.restart(arg%2 == 0)
	}},
	{"/run is full", 2, func(w *world, _ *csiDriver, _ uint64) { w.files.mounts["r"].err = syscall.ENOSPC }},
	{"/run has room", 5, func(w *world, _ *csiDriver, _ uint64) { w.files.mounts["r"].err = 0 }},

	{"PID 1 is busy", 2, func(w *world, _ *csiDriver, _ uint64) { w.pid1.busy = true }},
	{"PID 1 is idle", 3, func(w *world, _ *csiDriver, _ uint64) { w.pid1.busy = false }},
	{"the descriptor store is full", 2, func(w *world, _ *csiDriver, _ uint64) { w.pid1.full = true }},
	{"the descriptor store has room", 4, func(w *world, _ *csiDriver, _ uint64) { w.pid1.full = false }},
	{"no socket can be opened", 1, func(w *world, _ *csiDriver, _ uint64) { w.noSockets = true }},
	{"sockets can be opened", 4, func(w *world, _ *csiDriver, _ uint64) { w.opens() }},
	{"daemon restarts", 6, func(w *world, _ *csiDriver, _ uint64) { w.restart(false) }},
	{"daemon is killed", 6, func(w *world, _ *csiDriver, _ uint64) { w.restart(true) }},
	{"daemon restarts, and the clock is set", 3, func(w *world, _ *csiDriver, arg uint64) {
		w.clockStep = []time.Duration{-time.Hour, time.Hour, -8766 * time.Hour, 8766 * time.Hour}[arg%4]
		w.restart(arg%8 < 4)
	}},

	{"driver disabled", 4, func(w *world, d *csiDriver, _ uint64) {
		w.edit(d, func(c *config.Driver) { c.Enabled = false })
	}},
	{"driver enabled", 10, func(w *world, d *csiDriver, _ uint64) {
		w.edit(d, func(c *config.Driver) { c.Enabled = true })
	}},
	{"driver disabled for a moment", 3, func(w *world, d *csiDriver, arg uint64) {
		w.edit(d, func(c *config.Driver) { c.Enabled = false })
		go func() {
			time.Sleep(time.Duration(arg%5000) * time.Millisecond)
			w.mu.Lock()
			defer w.mu.Unlock()
			if !w.over {
				w.tell("driver enabled again (%s)", d.name)
				w.edit(d, func(c *config.Driver) { c.Enabled = true })
			}
		}()
	}},
	{"driver removed from the files", 3, func(w *world, d *csiDriver, arg uint64) {
		delete(w.admin.tables, d.name)
		// Volumes that are in use while root_dir changes, which may have to wait for the disk, are
		// left to the tests of daemon.
		good := w.admin.lastGood
		if h := w.of(d.name); arg%3 == 0 && !w.movesBack && (h.rootAt.IsZero() || time.Since(h.rootAt) > 2*recovery && good != nil && good.Kubelet.RootDir == w.admin.root) {
			h.unmountAt = time.Now().Add(time.Duration(arg%120) * time.Second)
			w.tell("its volumes are in use until %s", h.unmountAt.Sub(w.began))
		}
		w.noteUnwanted(d)
		w.of(d.name).newsAt = time.Now()
		w.admin.edited()
	}},
	{"driver has another timeout", 4, func(w *world, d *csiDriver, arg uint64) {
		w.edit(d, func(c *config.Driver) { c.Timeout = time.Duration(1+arg%5) * time.Second })
	}},
	{"driver has other versions", 2, func(w *world, d *csiDriver, arg uint64) {
		w.edit(d, func(c *config.Driver) { c.SupportedVersions = []string{fmt.Sprint("1.", arg%3, ".0")} })
	}},
	{"driver has another when_limit_changes", 2, func(w *world, d *csiDriver, arg uint64) {
		w.edit(d, func(c *config.Driver) {
			c.WhenLimitChanges = []config.WhenLimitChanges{config.Leave, config.Republish}[arg%2]
		})
	}},
	{"the driver's endpoint moves", 3, func(w *world, d *csiDriver, arg uint64) {
		w.edit(d, func(c *config.Driver) {
			if c.Endpoint = d.socket; arg%2 == 0 {
				c.Endpoint = d.otherSocket()
			}
			if arg%4 < 2 {
				c.Socket = c.Endpoint
			}
		})
	}},
	{"root_dir changes", 3, func(w *world, _ *csiDriver, _ uint64) { w.moveRoot() }},
	{"root_dir changes for a moment", 1, func(w *world, _ *csiDriver, arg uint64) {
		w.moveRoot()
		w.movesBack = !w.movesBack
		go func() {
			time.Sleep(time.Duration(arg%5000) * time.Millisecond)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.moveBack()
		}()
	}},
	{"the kubelet's root directory changes", 2, func(w *world, _ *csiDriver, _ uint64) { w.moveKubelet() }},
	{"files are broken", 2, func(w *world, _ *csiDriver, _ uint64) {
		if good := w.admin.lastGood; good == nil || good.Kubelet.RootDir == w.admin.root {
			w.admin.broken = true
			w.admin.edited()
		}
	}},
	{"files are right", 4, func(w *world, _ *csiDriver, _ uint64) { w.repair() }},
	{"reload", 4, func(w *world, _ *csiDriver, _ uint64) { w.admin.reload() }},
	{"reregister", 5, func(w *world, d *csiDriver, arg uint64) { w.admin.reregister(d.name, arg%4 == 0) }},
}

// repair corrects the files: the daemon then reads everything that was written in the meantime.
func (w *world) repair() {
	if !w.admin.broken {
		return
	}
	w.admin.broken = false
	w.admin.edited()
	for _, d := range w.drivers {
		w.of(d.name).newsAt = time.Now()
	}
}

func (w *world) opens() {
	if w.noSockets {
		w.noSockets, w.opensAt = false, time.Now()
	}
}

// moveRoot sets root_dir to the other directory.
func (w *world) moveRoot() {
	if slices.ContainsFunc(w.drivers, func(d *csiDriver) bool { return w.inUse(d.name) }) {
		return // it would be refused
	}
	if w.admin.broken {
		return // whose root_dir counts then is left to the tests of internal/node/config
	}
	w.admin.root = other(w.admin.root)
	for _, d := range w.drivers {
		w.of(d.name).newsAt, w.of(d.name).rootAt = time.Now(), time.Now()
		w.noteUnwanted(d)
		if w.process != nil {
			w.process.first[d.name] = true
		}
	}
	w.admin.edited()
}

// moveBack ends a change for a moment.
func (w *world) moveBack() {
	if w.movesBack && !w.over {
		w.movesBack = false
		w.tell("root_dir changes back")
		w.moveRoot()
	}
}

// moveKubelet starts the kubelet with the other --root-dir.
func (w *world) moveKubelet() {
	w.kubelet.stop()
	w.kubelet.root = other(w.kubelet.root)
	w.kubelet.start()
}

func other(root string) string {
	if root == rootDirs[0] {
		return rootDirs[1]
	}
	return rootDirs[0]
}

func (m *mount) freeze() {
	if m.hang == nil {
		m.hang = make(chan struct{})
	}
}

// freezeOne returns what ends it; nil: another call is to hang.
func (m *mount) freezeOne(after int) chan struct{} {
	if m.stallEnd != nil {
		return nil
	}
	m.stall, m.stallEnd = after, make(chan struct{})
	m.stalled = append(m.stalled, m.stallEnd)
	return m.stallEnd
}

// thawOne lets the call go on that hangs until end, if it has not gone on.
func (m *mount) thawOne(end chan struct{}) {
	if i := slices.Index(m.stalled, end); i >= 0 {
		close(end)
		m.stalled = slices.Delete(m.stalled, i, i+1)
		m.thawedAt = time.Now()
	}
	if m.stallEnd == end {
		m.stallEnd = nil
	}
}

// removeRegistry removes plugins_registry, also in the middle of a publication.
func (w *world) removeRegistry() {
	w.files.removeAll(w.registry())
	if p := w.process; p != nil {
		for _, d := range w.drivers {
			p.lostAt[d.name] = time.Now()
		}
	}
}

// writable ends that changes fail.
func (m *mount) writable() {
	if m.err != 0 {
		m.err, m.writableAt = 0, time.Now()
	}
}

func (m *mount) thaw() {
	if m.hang != nil || len(m.stalled) > 0 {
		m.thawedAt = time.Now()
	}
	if m.hang != nil {
		close(m.hang)
		m.hang = nil
	}
	for _, c := range m.stalled {
		close(c)
	}
	m.stalled, m.stallEnd = nil, nil
}

// besides is where another registrar serves the driver, besides ours.
func (w *world) besides(d *csiDriver) string { return sidecars[place{w.admin.root, d.name}] }

// sidecar is a node-driver-registrar, which puts its socket over whatever is there.
func (w *world) sidecar(d *csiDriver, name string, arg uint64) {
	_, told := w.announced(d)
	endpoint := told.Endpoint
	if arg%4 == 0 {
		endpoint = "/r/sidecar.sock"
	}
	if w.files.nodes[w.registry()] != nil {
		delete(w.failed, name)
		if name == w.socketOf(d.name) { // a hint
			delete(w.failed, w.registry())
		}
		// a publication waits for 300 ms
		slow := max(0, time.Duration(arg/4%8)-4) * 230 * time.Millisecond
		w.replace(name, &node{mode: syscall.S_IFSOCK, maker: "sidecar", sock: &sock{bound: name, refs: 1, driver: d.name, endpoint: endpoint, slow: slow}})
	}
}

func (w *world) replace(name string, n *node) {
	if w.files.nodes[name] != nil {
		w.files.lose(name)
	}
	w.files.put(name, n)
	driver := driverOf(name)
	if driver != "" {
		w.of(driver).cameAt = time.Now()
	}
	if p := w.process; p != nil {
		if n.sock != nil {
			driver = n.sock.driver
		}
		p.lose(driver, taken)
	}
}

func (w *world) endSidecars(d *csiDriver, remove bool) {
	for _, name := range append(w.files.below(rootDirs[0]), w.files.below(rootDirs[1])...) {
		if n := w.files.nodes[name]; n.maker == "sidecar" && n.sock.driver == d.name {
			n.sock.refs = 0
			if remove {
				w.files.drop(name)
			}
		}
	}
}

// restart ends the daemon; the next one starts when it has ended, or 100 ms after it was killed.
func (w *world) restart(kill bool) {
	p := w.process
	if p == nil {
		return
	}
	w.ended = append(w.ended, p)
	p.stop(kill)
	go func() {
		if kill {
			time.Sleep(100 * time.Millisecond)
		} else {
			select {
			case <-p.done:
			case <-time.After(30 * time.Second): // TimeoutStopSec=
			}
			w.mu.Lock()
			p.exit()
			w.mu.Unlock()
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.over {
			w.startDaemon()
		}
	}()
}

func (w *world) edit(d *csiDriver, change func(*config.Driver)) {
	var c config.Driver
	if t := w.admin.tables[d.name]; t != nil {
		c = *t
	} else {
		c = config.DefaultDriver(d.name, d.socket)
	}
	change(&c)
	if w.admin.tables[d.name] = &c; !c.Enabled {
		w.noteUnwanted(d)
	}
	w.of(d.name).newsAt = time.Now()
	w.admin.edited()
}

// do makes an event happen.
func (w *world) do(e event) {
	for _, k := range kinds {
		if k.name == e.kind {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.tell("%s", e)
			k.do(w, w.drivers[e.driver], e.arg)
			return
		}
	}
	panic("no such event: " + e.kind)
}

// toTheLimit has the seeds (by their remainder) in which only a few things happen, with how often:
// up to a limit of publications, and requests after the clock was set.
var toTheLimit = map[uint64]map[string]int{
	3: {"driver comes": 1, "daemon restarts, and the clock is set": 5, "reregister": 8},
	5: {"socket removed": 4, "driver has another limit": 4, "driver comes": 1},
	// twenty removals, and more
	11: {"socket removed": 20, "driver comes": 1},
	// likewise refusals
	13: {"driver comes": 20, "API server fails": 4, "driver has another limit": 3},
	7:  {"driver comes": 1, "socket removed": 12, "another registrar takes the path": 3, "another registrar ends": 6},
	9:  {"driver comes": 10, "another driver at its path": 10, "socket removed": 1},
}

// eventsOf returns the events of a seed. Each seed prefers some kinds and one pace, so that it goes
// deep somewhere.
func eventsOf(seed uint64, n int) []event {
	random := rand.New(rand.NewPCG(seed, 31))
	weights, total := make([]int, len(kinds)), 0
	for i, k := range kinds {
		weights[i] = k.weight
		switch random.IntN(6) {
		case 0:
			weights[i] *= 5
		case 1:
			weights[i] = 0
		}
		if only, ok := toTheLimit[seed%16]; ok {
			weights[i] = only[k.name]
		}
		total += weights[i]
	}
	pace := random.IntN(4)
	switch seed % 16 {
	case 3, 5:
		pace = restless
	case 11, 13:
		pace = steady
	case 7, 9:
		pace = 0
	}
	events := make([]event, n)
	for i := range events {
		at := random.IntN(total)
		k := 0
		for ; at >= weights[k]; k++ {
			at -= weights[k]
		}
		if seed%2 == 0 && (i == n/3 || i == 2*n/3) {
			events[i] = event{time.Second, healing, 0, random.Uint64()}
			continue
		}
		events[i] = event{pause(random, pace), kinds[k].name, random.IntN(2), random.Uint64()}
		if _, ok := toTheLimit[seed%16]; ok && seed%16 != 5 {
			events[i].driver = 1
		}
	}
	return events
}

// healing is the event that everything is repaired, and settles.
const healing = "healing"

// restless is the pace of a seed in which there is always something to change.
const restless = -1

// steady is the pace of a seed in which each event is for what the one before has led to.
const steady = -2

// pause is mostly short: the orders that nobody thinks of are those within one change.
func pause(random *rand.Rand, pace int) time.Duration {
	ms := func(n int) time.Duration { return time.Duration(random.IntN(n*1000)) * time.Microsecond }
	if pace == restless {
		return 10*time.Second + ms(1+[]int{10_000, 10_000, 400_000}[random.IntN(3)])
	}
	if pace == steady {
		return time.Second + ms(5000)
	}
	switch random.IntN(10 + 4*pace) {
	case 0, 1, 2:
		return 0
	case 3, 4:
		return ms(60)
	case 5, 6:
		return ms(1500)
	case 7, 8:
		return ms(5000)
	case 9:
		return ms(30000)
	case 10:
		return ms(200000)
	default:
		return ms(10000)
	}
}
