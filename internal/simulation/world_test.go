package simulation

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/registrar"
	"csi-registrar/internal/status"
)

// world is a node: the real daemon among models. Its lock guards all models.
type world struct {
	mu      sync.Mutex
	null    int // a descriptor to copy
	began   time.Time
	files   *files
	socks   map[string]*sock
	conns   [256]*conn
	kubelet *kubeletModel
	drivers []*csiDriver
	pid1    pid1
	admin   *admin
	process *process // the daemon that runs; nil: none

	connections, processes int
	ended                  []*process
	recorders              map[string]*recorder
	known                  map[string]*history
	violation              string
	over                   bool // nothing is started any more
	seen                   *coverage
	failed                 map[string]bool // paths that could not be changed
	story                  []string        // nil: nobody wants it
}

// history is what happened to a driver's registration.
type history struct {
	reregistered int
	newsAt       time.Time // when the kubelet had to learn something, or its table changed
	movedAt      time.Time
	wrongSince   map[string]time.Time
}

// coverage counts what was reached.
type coverage struct {
	causes, states map[string]int
	events         int
}

func (w *world) of(driver string) *history {
	if w.known[driver] == nil {
		w.known[driver] = &history{wrongSince: map[string]time.Time{}}
	}
	return w.known[driver]
}

func newWorld(null int, seed uint64, seen *coverage) *world {
	w := &world{null: null, began: time.Now(), socks: map[string]*sock{}, recorders: map[string]*recorder{}, known: map[string]*history{}, seen: seen, failed: map[string]bool{}}
	w.pid1.held = map[string][]*sock{}
	w.admin = &admin{w: w, tables: map[string]*config.Driver{}, traces: map[string]*recorder{}}
	w.kubelet = newKubelet(w, seed%2 == 0)
	w.files = newFiles(w)
	// Where calls take their time, events come in between. Some disks are almost too slow.
	latencies := []time.Duration{0, 0, 0, 0, 300 * time.Microsecond, 300 * time.Microsecond, 20 * time.Millisecond, 20 * time.Millisecond, 250 * time.Millisecond}
	w.files.latency = latencies[seed%uint64(len(latencies))]
	for i, name := range []string{"a.example", "b.example"} {
		d := &csiDriver{w: w, name: name, socket: "/r/" + name + ".sock", state: "down", changed: make(chan struct{}), generation: 1}
		d.id = status.Identity{Name: name, Version: "1", NodeID: "node", Topology: map[string]string{"zone." + name: "x"}}
		w.drivers = append(w.drivers, d)
		c := config.DefaultDriver(name, d.socket)
		if i == 0 {
			c.EndpointLink = true
		} else {
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
		if d.socket == socket {
			return d
		}
	}
	return nil
}

func (w *world) mustStay(string) string { return "" }

func socketOf(driver string) string { return registry + "/" + driver + "-reg.sock" }
func recordOf(driver string) string { return runDir + "/registrations/" + driver + ".json" }
func linkOf(driver string) string   { return rootDir + "/plugins/csi-registrar/" + driver + ".sock" }

func driverOf(socket string) string {
	return strings.TrimSuffix(strings.TrimPrefix(socket, registry+"/"), "-reg.sock")
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

// removedByDaemon checks that nothing of others is removed, except sockets on which nobody listens.
func (w *world) removedByDaemon(p *process, name string, n *node) {
	stale := n.mode&syscall.S_IFMT == syscall.S_IFSOCK && (n.sock == nil || n.sock.refs == 0)
	if n.maker != "daemon" && !stale && !strings.Contains(name, "/.t-") {
		w.violated("nothing of others is removed", "process %d removes %s of %s", p.number, name, n.maker)
	}
}

// adoptable reports whether a process that starts now finds the registration as it should be.
func (w *world) adoptable(d *csiDriver) bool {
	held, n := w.pid1.held[kubelet.StorePrefix+d.name], w.files.nodes[socketOf(d.name)]
	record := w.files.nodes[recordOf(d.name)]
	return len(held) == 1 && n != nil && n.sock == held[0] && record != nil &&
		strings.Contains(string(record.data), `"`+n.sock.bound+`"`)
}

// caused notes why something is about to be published or withdrawn.
func (w *world) caused(p *process, driver, cause string, withdraw bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead {
		return
	}
	w.seen.causes[cause]++
	w.tell("daemon %d: %s because of %q (%s)", p.number, map[bool]string{true: "withdraws", false: "publishes"}[withdraw], cause, driver)
	if withdraw {
		p.first[driver], p.causes[driver] = true, nil
		return
	}
	p.causes[driver] = append(p.causes[driver], cause)
	p.causedAt[driver] = time.Now()
	h := w.of(driver)
	n := w.files.nodes[socketOf(driver)]
	ours := n != nil && n.sock != nil && n.sock.by == p && n.sock.refs > 0
	justified := false
	switch registrar.Cause(cause) {
	case registrar.CauseRemoved, registrar.CauseReplaced:
		justified = !ours
	case registrar.CauseChanged:
		// What a call announced that hung was older than its publication.
		late := w.files.mounts["k"].thawedAt.After(h.movedAt.Add(-time.Minute))
		justified = !h.newsAt.IsZero() && (late || h.newsAt.After(h.movedAt.Add(-5*time.Minute)))
	case registrar.CauseAsked:
		justified = p.asked[driver] < h.reregistered
	case registrar.CauseReturned:
		justified = ours && n.sock.told != nil && !n.sock.told.Registered
	case registrar.CauseSilent:
		last := time.Time{}
		registered := false
		if ours {
			if last = n.sock.askedAt; n.sock.toldAt.After(last) {
				last = n.sock.toldAt
			}
			registered = n.sock.told != nil && n.sock.told.Registered
		}
		justified = ours && !registered && time.Since(last) >= 150*time.Second
	}
	if !justified && !w.disturbed(p) && !w.failed[recordOf(driver)+".new"] {
		w.violated("each republication has its cause", "%s is republished because of %q, which is not so", driver, cause)
	}
}

// disturbed reports whether what a process sees can be late.
func (w *world) disturbed(p *process) bool {
	if p.stuck > 0 {
		return true
	}
	for _, m := range w.files.mounts {
		if m.hang != nil || m.err != 0 || m.stallEnd != nil {
			return true
		}
	}
	return false
}

// slowDisk is the latency of a call above which a publication can exceed its time limit (3 s). See
// what is open in the README.
const slowDisk = 200 * time.Millisecond

const (
	mostChanges = 12 // limit.go: within an hour
	changeTime  = 3 * time.Second
)

// published notes that a socket came to its path.
func (w *world) published(p *process, name string, n *node) {
	driver := driverOf(name)
	n.sock.driver, n.sock.movedAt = driver, time.Now()
	cause := ""
	// the oldest: a publication can be abandoned, and made after all
	if c := p.causes[driver]; len(c) > 0 && !p.first[driver] {
		cause, p.causes[driver] = c[0], c[1:]
	}
	w.tell("daemon %d: %s is published", p.number, driver)
	if cause == "" && !p.first[driver] && p.asked[driver] < w.of(driver).reregistered {
		cause = string(registrar.CauseAsked) // once more, while the first was under way
	}
	if cause == "" && !w.of(driver).newsAt.Before(p.causedAt[driver]) {
		cause = string(registrar.CauseChanged) // likewise
	}
	if cause == "" {
		w.seen.causes[string(registrar.CauseFirst)]++
		if !p.first[driver] && w.files.latency <= slowDisk {
			w.violated("each republication has its cause", "%s is published once more, without a cause", driver)
		}
	}
	if cause == string(registrar.CauseAsked) {
		p.asked[driver]++
	}
	p.first[driver] = false
	w.of(driver).movedAt = time.Now()
	// The registrar counts when it begins.
	moves := slices.DeleteFunc(p.moves[driver], func(t time.Time) bool { return time.Since(t) >= time.Hour-changeTime })
	p.moves[driver] = append(moves, time.Now())
	if most := mostChanges + p.asked[driver]; len(p.moves[driver]) > most && w.files.latency <= slowDisk {
		w.violated("at most 12 changes an hour", "%s: %d within an hour", driver, len(p.moves[driver]))
	}
}

// The invariants after each event. What takes its time, as a Check after a hint, is given that.
func (w *world) check() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.checkSockets()
	w.checkRetries()
	p := w.process
	if p == nil {
		return
	}
	w.mu.Unlock()
	doc := p.agent.Status()
	w.mu.Lock()
	for _, s := range doc.Drivers {
		w.seen.states[s.State]++
		if string(s.Driver) != s.State {
			w.seen.states["driver "+string(s.Driver)]++
		}
		w.checkStatus(p, s)
	}
}

// wrong is a violation when it was seen each time for longer than the limit.
func (w *world) wrong(is bool, driver string, limit time.Duration, rule, format string, args ...any) {
	since := w.of(driver).wrongSince
	key := rule + format
	switch at, before := since[key]; {
	case !is:
		delete(since, key)
	case !before:
		since[key] = time.Now()
	case time.Since(at) > limit:
		w.violated(rule, driver+" for %s: "+format, append([]any{time.Since(at)}, args...)...)
	}
}

const patience = 5 * time.Second // longer than a change may take

func (w *world) checkSockets() {
	sockets := map[string]int{}
	for _, name := range w.files.sockets(registry) {
		n := w.files.nodes[name]
		if n.maker != "daemon" || n.sock == nil {
			continue
		}
		driver := n.sock.driver
		if sockets[driver]++; sockets[driver] > 1 || name != socketOf(driver) {
			w.violated("at most one socket for a driver", "%s is at %s", driver, name)
		}
	}
	p := w.process
	for _, d := range w.drivers {
		n := w.files.nodes[socketOf(d.name)]
		calm := p != nil && time.Since(p.started) > patience && !w.disturbed(p)
		ours := n != nil && n.maker == "daemon" && n.sock != nil
		// With an error in the files nothing is withdrawn, nor what a process before left.
		idle := w.failed[socketOf(d.name)] || w.admin.broken
		w.wrong(calm && ours && !idle && (n.sock.refs == 0 || n.sock.by != p), d.name, patience, "a socket is served", "nobody serves it")
		ours = ours && n.sock.refs > 0 && n.sock.by == p
		link := w.files.nodes[linkOf(d.name)]
		r := (*recorder)(nil)
		if link != nil {
			r = w.recorders[link.target]
		}
		w.wrong(calm && ours && !w.failed[linkOf(d.name)] && r != nil && !r.leased, d.name, 15*time.Second, "the link never points to a recorder without a lease", "it does")
		held := w.pid1.held[kubelet.StorePrefix+d.name]
		kept := ours && len(held) == 1 && held[0] == n.sock
		w.wrong(calm && ours && !kept && !w.failed[socketOf(d.name)], d.name, patience, "the store has what is published", "it has not")
		record := w.files.nodes[recordOf(d.name)]
		recorded := ours && record != nil && strings.Contains(string(record.data), `"`+n.sock.bound+`"`) &&
			strings.Contains(string(record.data), `"registered":true`) == (n.sock.told != nil && n.sock.told.Registered)
		// what was told to the process before
		lost := p != nil && p.number > 1 && w.failed[recordOf(d.name)+".new"]
		w.wrong(calm && ours && !recorded && !lost, d.name, 15*time.Second, "the record says what the kubelet was told", "%s", recordText(record))
	}
}

func recordText(n *node) string {
	if n == nil {
		return "there is no record"
	}
	return string(n.data)
}

// checkRetries: what fails is tried again with growing pauses.
func (w *world) checkRetries() {
	p := w.process
	if p == nil {
		return
	}
	p.failures = slices.DeleteFunc(p.failures, func(f failure) bool { return time.Since(f.at) > 10*time.Minute })
	most := 250
	// A Check that exceeds its time is repeated when it has ended.
	if w.files.latency > slowDisk {
		most *= 4
	}
	count := map[string]int{}
	for _, f := range p.failures {
		class := f.path
		if i := strings.LastIndex(class, "/."); i >= 0 {
			class = class[:i]
		}
		if count[class]++; count[class] > most {
			w.violated("what fails is tried again with growing pauses", "%d times within 10 minutes: %s", count[class], class)
			return
		}
	}
}

func (w *world) checkStatus(p *process, s status.Driver) {
	d := w.driver(s.Name)
	n := w.files.nodes[socketOf(s.Name)]
	calm := time.Since(p.started) > patience && !w.disturbed(p)
	ours := n != nil && n.sock != nil && n.sock.by == p && n.sock.refs > 0
	told := ours && n.sock.told != nil
	if w.failed[recordOf(s.Name)+".new"] && p.number > 1 {
		return // what the kubelet said to the process before was lost
	}
	const rule = "the status is right"
	w.wrong(calm && s.Registration == status.Registered && !(told && n.sock.told.Registered), s.Name, patience, rule, "%s, and it is not", s.State)
	w.wrong(calm && s.Registration == status.Refused && !(told && !n.sock.told.Registered), s.Name, patience, rule, "%s, and it was not", s.State)
	w.wrong(calm && s.Registration == status.None && ours, s.Name, patience, rule, "%s, and its socket is published (%s)", s.State, s.Reason)
	table := w.admin.tables[s.Name]
	// one that is withdrawn is asked no more
	asked := table != nil && table.Enabled && s.State != status.Disabled
	back := told && !n.sock.told.Registered && d.since.After(n.sock.toldAt) && d.since.After(n.sock.askedAt) && d.since.After(p.started.Add(patience))
	w.wrong(calm && asked && back && d.state == "up" && s.Registration == status.Refused && s.DampedUntil.IsZero() && w.files.latency <= slowDisk,
		s.Name, 45*time.Second, "a driver that is back is registered", "%s: %s", s.State, s.Reason)
	w.wrong(calm && asked && s.Driver == status.Ready && d.state != "up" && d.state != "hang" && d.state != "slow" && time.Since(d.since) > 15*time.Second,
		s.Name, patience, rule, "the driver is ready, and it is %s", d.state)
	w.wrong(calm && asked && s.Driver != status.Ready && d.state == "up" && time.Since(d.since) > time.Minute,
		s.Name, patience, rule, "the driver is %s, and it is up (%s)", s.Driver, s.Reason)
}

// unsettled says what is not as it is to be in the end; empty: nothing. Everything is healed.
func (w *world) unsettled() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.process
	w.mu.Unlock()
	doc := p.agent.Status()
	w.mu.Lock()
	for _, d := range w.drivers {
		table := w.admin.tables[d.name]
		n := w.files.nodes[socketOf(d.name)]
		ours := n != nil && n.sock != nil && n.sock.by == p && n.sock.refs > 0
		s, shown := doc.Driver(d.name)
		id, inNode := w.kubelet.csiNode[d.name]
		link := w.files.nodes[linkOf(d.name)]
		switch {
		case table == nil || !table.Enabled:
			switch {
			case n != nil && !w.failed[socketOf(d.name)]: // else both file systems failed it
				return d.name + " is not enabled, and its socket is there"
			case len(w.pid1.held[kubelet.StorePrefix+d.name]) > 0:
				return d.name + " is not enabled, and in the descriptor store"
			case w.files.nodes[recordOf(d.name)] != nil:
				return d.name + " is not enabled, and has a record"
			case inNode && w.kubelet.drivers[d.name]:
				return d.name + " is not enabled, and in the CSINode"
			case link != nil && !w.failed[linkOf(d.name)]: // else the next start removes it
				return d.name + " is not enabled, and has a link"
			case shown && s.State != status.Disabled:
				return d.name + " is not enabled, and shown as " + s.State
			}
		case d.state == "down" && table.WhenGone == config.Withdraw:
			if n != nil || inNode && w.kubelet.drivers[d.name] {
				return d.name + " is gone, and not withdrawn: " + s.State + ": " + s.Reason
			}
		case d.state == "up":
			collision := ours && n.sock.told != nil && strings.Contains(n.sock.told.Error, "collision")
			switch {
			case !ours:
				return d.name + " is not published: " + s.State + ": " + s.Reason
			case collision:
				if s.State != string(status.Refused) {
					return d.name + " is refused, and shown as " + s.State
				}
			case w.kubelet.robbed[d.name]: // by the end of another registrar
			// what the kubelet said to the process before was lost
			case w.failed[recordOf(d.name)+".new"]:
			case !inNode || !w.kubelet.drivers[d.name]:
				return d.name + " is not registered: " + s.State + ": " + s.Reason
			case id.NodeID != d.id.NodeID && labelsAllow(w, d) && table.WhenLimitChanges != config.Leave:
				return fmt.Sprintf("%s has the node id %q in the CSINode, and is %q: %s", d.name, id.NodeID, d.id.NodeID, s.Reason)
			case s.State != string(status.Registered):
				return d.name + " is registered, and shown as " + s.State + ": " + s.Reason
			case table.EndpointLink && (link == nil || link.target != table.Endpoint):
				return d.name + " has no link to the driver"
			}
		}
	}
	for _, name := range w.files.below(rootDir) {
		if n := w.files.nodes[name]; n.sock != nil && n.sock.refs > 0 && n.maker == "daemon" && !strings.HasPrefix(name, registry+"/") {
			return "a socket is left at " + name
		}
	}
	return ""
}

// labelsAllow reports whether the kubelet would accept the driver's topology.
func labelsAllow(w *world, d *csiDriver) bool {
	for key, value := range d.id.Topology {
		if have := w.kubelet.labels[key]; have != "" && have != value {
			return false
		}
	}
	return true
}

func (w *world) dampedUntil() (t time.Time) {
	for _, s := range w.process.agent.Status().Drivers {
		if s.DampedUntil.After(t) {
			t = s.DampedUntil
		}
	}
	return t
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.SortedFunc(maps.Keys(m), cmp.Compare[string])
}
