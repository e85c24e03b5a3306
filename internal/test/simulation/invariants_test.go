package simulation

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
)

// record is the content of a file that regsocket.Socket wrote.
type record struct {
	Path         string              `json:"path"`
	Cookie       uint64              `json:"cookie"`
	Ino          uint64              `json:"ino"`
	GetInfoAt    time.Time           `json:"get_info_at"`
	Announced    status.Announcement `json:"announced"`
	Notification status.Notification `json:"notification"`
}

var noRecord = &record{}

func (n *node) recorded() *record {
	if n == nil {
		return noRecord
	}
	if n.record == nil {
		n.record = &record{}
		if err := json.Unmarshal(n.data, n.record); err != nil {
			panic(err)
		}
	}
	return n.record
}

// of reports whether it is the complete record of a socket.
func (r *record) of(n *node) bool {
	return n.sock != nil && r.Cookie == n.sock.cookie && r.Ino == n.Ino
}

// movedAt returns when a socket came to its path.
func (n *node) movedAt() (t time.Time) {
	if n != nil && n.sock != nil {
		t = n.sock.movedAt
	}
	return t
}

// adoptable reports whether a process that starts now finds the registration as it should be.
func (w *world) adoptable(d *csiDriver) bool {
	held, n := w.pid1.held[storeName(d.name)], w.files.nodes[w.socketOf(d.name)]
	return len(held) == 1 && n != nil && n.sock == held[0] && w.files.nodes[recordOf(d.name)].recorded().of(n)
}

// caused notes why something is about to be published or withdrawn.
func (w *world) caused(p *process, driver, cause string, withdraw bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead {
		return
	}
	w.seen.causes[cause]++
	if w.story != nil {
		w.tell("daemon %d: %s because of %q (%s)", p.number, map[bool]string{true: "withdraws", false: "publishes"}[withdraw], cause, driver)
	}
	if withdraw {
		p.first[driver], p.causes[driver] = true, nil
		w.checkWithdrawal(p, w.driver(driver), registrar.Cause(cause))
		return
	}
	p.causes[driver] = append(p.causes[driver], cause)
	p.causedAt[driver] = time.Now()
	h := w.of(driver)
	n, ours, lost, justified := (*node)(nil), false, false, false
	for _, root := range []string{other(w.admin.root), w.admin.root} { // as it was
		at := w.files.nodes[socketIn(root, driver)]
		if at != nil && at.sock != nil && at.sock.by == p && at.sock.refs > 0 {
			n, ours = at, true
		} else if root == w.admin.root || time.Since(h.rootAt) < recovery {
			lost = true
		}
	}
	switch registrar.Cause(cause) {
	case registrar.CauseRemoved, registrar.CauseReplaced:
		justified = lost
	case registrar.CauseChanged:
		// A call that hung announced an answer that was older than its publication; while nothing
		// could be written, news waited.
		k, before := w.files.mounts["k"], h.movedAt.Add(-time.Minute)
		late := k.thawedAt.After(before) || k.writableAt.After(before)
		justified = w.differs(driver, n) && !h.newsAt.IsZero() && (late || h.newsAt.After(h.movedAt.Add(-5*time.Minute)))
	case registrar.CauseAsked:
		// A publication below another root_dir may have been counted for the one that was asked
		// for and hung.
		justified = p.asked[driver] < h.reregistered || time.Since(h.calledAt) < patience || h.rootAt.After(h.requestedAt)
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
		justified = ours && !registered && (time.Since(last) >= 150*time.Second || p.clockSet)
	}
	// It changes at this instant.
	justified = justified || ours && (n.sock.answering > 0 || n.sock.toldAt.Equal(time.Now()))
	if !justified && !w.disturbed(p) && (n == nil || n.sock == nil || !n.sock.forgotten) {
		w.violated("each republication has its cause", "%s is republished because of %q, which is not so", driver, cause)
	}
}

// differs reports whether the kubelet has something to learn about a driver: it refused, or what
// was announced is not what the files and the driver say.
func (w *world) differs(driver string, n *node) bool {
	rec, d := w.files.nodes[recordOf(driver)].recorded(), w.driver(driver)
	if n == nil || !rec.of(n) || n.sock.told == nil || !n.sock.told.Registered ||
		time.Since(w.admin.editedAt) < patience || time.Since(d.since) < patience {
		return true
	}
	now, was := d.identity(), rec.Announced
	_, a := w.announced(d)
	return was.Endpoint != a.Endpoint || !slices.Equal(was.Versions, a.Versions) || was.Identity.NodeID != now.NodeID ||
		was.Identity.MaxVolumes != now.MaxVolumes || !maps.Equal(was.Identity.Topology, now.Topology)
}

// checkWithdrawal: a withdrawal has its cause.
func (w *world) checkWithdrawal(p *process, d *csiDriver, cause registrar.Cause) {
	h, table, justified := w.of(d.name), w.admin.tables[d.name], false
	if table == nil && h.tableOf == p { // it stays in force while its volumes are in use
		table = &h.table
	}
	switch cause {
	case registrar.CauseGone:
		// It may have come and gone without a hint: until it was asked, or while it did not answer.
		justified = table != nil && table.WhenGone == config.Withdraw && d.state == "down" &&
			(time.Since(d.since) >= table.WithdrawAfter || time.Since(d.missed) < recovery)
		// It comes at this instant.
		justified = justified || table != nil && table.WhenGone == config.Withdraw && d.since.Equal(time.Now())
		// Volumes in use keep the table that is gone, with what it says.
		justified = justified || table == nil && d.state == "down" && time.Since(h.unmountAt) < 20*time.Second
	case registrar.CauseMismatch:
		justified = d.isOther || time.Since(d.otherAt) < 15*time.Second
	case registrar.CauseLeaving:
		if table == nil && w.inUse(d.name) {
			w.violated("a driver whose volumes are in use stays", "%s is withdrawn", d.name)
		}
		justified = !w.wanted(d) || p.moving || time.Since(h.unwantedAt) < recovery+15*time.Second || h.unwantedAt.After(p.started) && w.troubled()
	}
	if !justified && !w.disturbed(p) && !w.admin.broken && time.Since(w.admin.editedAt) > 2*patience+5*time.Second {
		w.violated("each withdrawal has its cause", "%s is withdrawn because of %q, which is not so", d.name, cause)
	}
}

// wanted reports whether the files have the driver.
func (w *world) wanted(d *csiDriver) bool {
	table := w.admin.tables[d.name]
	return table != nil && table.Enabled
}

// noteUnwanted notes that the registrar is to end.
func (w *world) noteUnwanted(d *csiDriver) { w.of(d.name).unwantedAt = time.Now() }

// disturbed reports whether what a process sees can be late.
func (w *world) disturbed(p *process) bool {
	if p != nil && p.stuck > 0 || time.Since(w.faultAt) < 3*patience { // it looks again after 10 s
		return true
	}
	for _, m := range w.files.mounts {
		if m.hang != nil || m.err != 0 || m.stallEnd != nil || m.fault != 0 {
			return true
		}
	}
	return false
}

// slowDisk is the latency of a call above which a publication can exceed its time limit (3 s). See
// what is open in the README.
const slowDisk = 200 * time.Millisecond

const changeTime = 3 * time.Second

// published notes that a socket came to its path.
func (w *world) published(p *process, name string, n *node) {
	driver := driverOf(name)
	n.sock.driver, n.sock.movedAt = driver, time.Now()
	cause := ""
	if w.satisfied(p, driver, n.sock) {
		w.violated("a request that the kubelet has satisfied has no publication", "%s", driver)
	}
	// the oldest: a publication can be abandoned, and made after all
	if c := p.causes[driver]; len(c) > 0 {
		cause, p.causes[driver] = c[0], c[1:]
	}
	w.tell("daemon %d: %s is published", p.number, driver)
	if cause == "" && !p.first[driver] && p.asked[driver] < w.of(driver).reregistered {
		cause = string(registrar.CauseAsked) // once more, while the first was under way
	}
	if cause == "" && !p.first[driver] && !w.of(driver).newsAt.Before(p.causedAt[driver]) {
		cause = string(registrar.CauseChanged) // likewise
	}
	if cause == "" {
		w.seen.causes[string(registrar.CauseFirst)]++
		if !p.first[driver] && time.Since(p.twice[driver]) > patience && time.Since(w.files.mounts["k"].thawedAt) > patience && w.files.latency <= slowDisk && name == w.socketOf(driver) {
			w.violated("each republication has its cause", "%s is published once more, without a cause", driver)
		}
	}
	if cause == string(registrar.CauseAsked) {
		p.asked[driver]++
	}
	if p.first[driver] && cause != "" { // a late one, and another is under way
		p.twice[driver] = time.Now()
	}
	p.first[driver] = false
	w.of(driver).movedAt = time.Now()
	old := w.of(driver).last
	w.of(driver).last = n.sock
	w.countMove(p, driver, cause, old)
}

// satisfied reports whether a reregister is the reason of a publication, and the kubelet has
// registered the driver since by itself, as when it was restarted: it would do the same again.
func (w *world) satisfied(p *process, driver string, with *sock) bool {
	h, causes := w.of(driver), p.causes[driver]
	old := h.told
	if p.first[driver] || len(causes) == 0 || causes[len(causes)-1] != string(registrar.CauseAsked) || h.asking > 0 || old == nil {
		return false
	}
	serves := old.by == p && old.refs > 0 && path.Dir(old.bound) == path.Dir(with.bound)
	late := w.disturbed(p) || time.Since(w.files.mounts["k"].thawedAt) < patience || w.files.latency > slowDisk
	return serves && !late && old.toldAt.After(h.acceptedAt) && with.madeAt.Sub(old.toldAt) > changeTime
}

// check checks the invariants after each event. It allows for actions that take time, such as a
// Check after a hint.
func (w *world) check() {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.process
	since := func(at *time.Time, is bool) {
		if !is {
			*at = time.Time{}
		} else if at.IsZero() {
			*at = time.Now()
		}
	}
	damaged, foreign := w.damaged(p), w.foreign()
	if damaged {
		w.damagedAt = time.Now()
	}
	if foreign {
		w.foreignAt = time.Now()
	}
	for _, d := range w.drivers {
		if w.files.nodes[w.besides(d)] != nil {
			w.besidesAt = time.Now()
		}
	}
	since(&w.undamagedSince, p != nil && !damaged)
	since(&w.freeSince, !foreign)
	since(&w.intactSince, p != nil && !damaged && !foreign)
	var doc status.Document
	if p != nil {
		w.mu.Unlock()
		doc = p.agent.Status()
		w.mu.Lock()
		w.checkRetries()
		for _, name := range driverNames {
			h := w.of(name)
			// An edit takes effect within a minute, which a pause may have hidden.
			if w.admin.editedAt.After(h.checkedAt.Add(-time.Minute)) || h.tableOf != p {
				table, _ := p.agent.Configured(name)
				h.inForce(p, table, w.noSockets || time.Since(w.opensAt) < recovery/2)
			}
			h.checkedAt = time.Now()
		}
	}
	calm := p != nil && time.Since(p.started) > patience && !w.disturbed(p)
	for _, d := range w.drivers {
		s := shown(&doc, d.name)
		w.checkSocket(p, d, s, calm)
		if s != noStatus {
			w.seen.states[s.State]++
			if s.Registration == status.Conflict {
				p.conflicts[d.name] = true
			}
			if string(s.Driver) != s.State {
				w.seen.states["driver "+string(s.Driver)]++
			}
			w.checkStatus(p, d, s, calm)
			w.checkDelay(p, s)
		}
	}
	w.checkPlaces()
}

// noStatus is that of a driver which a document does not have.
var noStatus = &status.Driver{}

func shown(doc *status.Document, driver string) *status.Driver {
	for i := range doc.Drivers {
		if doc.Drivers[i].Name == driver {
			return &doc.Drivers[i]
		}
	}
	return noStatus
}

// intact reports whether nothing but drivers and kubelet can hinder the daemon.
func (w *world) intact() bool { return w.undamaged() && !w.foreign() }

// undamaged reports whether everything that the daemon needs works.
func (w *world) undamaged() bool {
	return w.process != nil && !w.damaged(w.process)
}

func (w *world) damaged(p *process) bool {
	return w.disturbed(p) || w.admin.broken || w.pid1.busy || w.pid1.full || w.noSockets || w.files.latency > slowDisk
}

// recovered reports whether nothing that ended then can still delay what a process does.
func (p *process) recovered(ended time.Time) bool {
	return ended.Before(p.started) || time.Since(ended) > recovery
}

// inForce notes the table that a process has in force, maybe without a registrar.
func (h *history) inForce(p *process, table config.Driver, none bool) {
	if h.tableOf != p || none || !table.Enabled || !h.table.Enabled {
		h.tableUntil = time.Time{}
	} else if !table.Equal(h.table) {
		h.tableUntil = h.checkedAt
	}
	h.table, h.tableOf = table, p
}

// foreign reports whether somebody else has something in a directory of registration sockets.
func (w *world) foreign() bool {
	for name, n := range w.files.nodes {
		if (n.maker == "sidecar" || n.maker == "admin" && n.mode&syscall.S_IFMT != syscall.S_IFDIR) && path.Base(path.Dir(name)) == rootdir.PluginsRegistryName {
			return true
		}
	}
	return false
}

// troubled reports whether something may still be tried again.
func (w *world) troubled() bool {
	return w.intactSince.IsZero() || time.Since(w.intactSince) < recovery
}

// recovery is how long the daemon may pause before it tries again what failed: a withdrawal.
const recovery = 75 * time.Second

// wrong is a violation when it was seen each time for longer than the limit. The arguments are
// pointers to those of the format: nearly always none is needed.
func (w *world) wrong(is bool, driver string, limit time.Duration, rule, format string, args ...any) {
	if !is && w.wrongs == 0 { // nearly always
		return
	}
	since := w.of(driver).wrongSince
	key := [2]string{rule, format}
	switch at, before := since[key]; {
	case !is:
		delete(since, key)
		if before {
			w.wrongs--
		}
	case !before:
		since[key] = time.Now()
		w.wrongs++
	case time.Since(at) > limit:
		values := []any{time.Since(at)}
		for _, a := range args {
			values = append(values, reflect.ValueOf(a).Elem().Interface())
		}
		w.violated(rule, driver+" for %s: "+format, values...)
	}
}

const patience = 5 * time.Second // longer than a change may take

// checkEnd: an orderly end leaves no socket that nobody listens to.
func (w *world) checkEnd(p *process) {
	if w.disturbed(p) || time.Since(w.of(driverNames[0]).rootAt) < recovery {
		return
	}
	for _, d := range w.drivers {
		for _, root := range rootDirs {
			name := socketIn(root, d.name)
			n := w.files.nodes[name]
			if n != nil && n.sock != nil && n.sock.by == p && n.sock.refs == 0 && !w.failed[name] && !w.lost[name] && !p.troubled && w.files.latency <= slowDisk {
				w.violated("an orderly end leaves no socket that nobody listens to", "%s", name)
			}
		}
	}
}

// checkPlaces: at most one socket for a driver in a directory, at its path.
func (w *world) checkPlaces() {
	for name, n := range w.files.nodes {
		if n.maker != "daemon" || n.sock == nil {
			continue
		}
		d := n.sock.driver
		if name == socketIn(rootDirs[0], d) || name == socketIn(rootDirs[1], d) ||
			path.Base(path.Dir(name)) != rootdir.PluginsRegistryName || strings.HasPrefix(path.Base(name), ".") {
			continue
		}
		w.violated("at most one socket for a driver", "%s is at %s", d, name)
	}
}

func (w *world) checkSocket(p *process, d *csiDriver, s *status.Driver, calm bool) {
	if p == nil {
		return
	}
	h := w.of(d.name)
	n := w.files.nodes[w.socketOf(d.name)]
	ours := n != nil && n.maker == "daemon" && n.sock != nil
	moving := time.Since(h.rootAt) < recovery || w.admin.broken || h.rootAt.After(p.started) && w.troubled()
	// With an error in the files nothing is withdrawn, nor what a process before left.
	idle := w.failed[w.socketOf(d.name)] || moving || w.noSockets || time.Since(w.opensAt) < recovery/2 || w.lost[w.socketOf(d.name)]
	w.wrong(calm && ours && !idle && (n.sock.refs == 0 || n.sock.by != p), d.name, patience, "a socket is served", "nobody serves it")
	ours = ours && n.sock.refs > 0 && n.sock.by == p
	held := w.pid1.held[storeName(d.name)]
	kept := ours && len(held) == 1 && held[0] == n.sock
	w.wrong(calm && ours && !moving && s.NotKept == "" && !kept, d.name, patience, "the store has what is published", "it has not")
	rec := w.files.nodes[recordOf(d.name)].recorded()
	registered := n != nil && n.sock != nil && n.sock.told != nil && n.sock.told.Registered
	recorded := ours && rec.of(n) && rec.Notification.Registered == registered
	// what was told to the process before
	lost := ours && n.sock.forgotten
	w.wrong(calm && ours && !recorded && !lost && !moving, d.name, 15*time.Second, "the record says what the kubelet was told", "%+v", rec)

	w.wrong(calm && ours && recorded && !moving && n.sock.askedAt.After(p.started) && !rec.GetInfoAt.Equal(n.sock.askedAt), d.name, 15*time.Second,
		"the record says what the kubelet was told", "asked at %s", &rec.GetInfoAt)

	since := func(at time.Time, least time.Duration) bool { return !at.IsZero() && time.Since(at) > least }
	if w.undamagedSince.IsZero() || !p.recovered(w.damagedAt) || w.freeSince.IsZero() || time.Since(p.started) < patience {
		return
	}
	if !ours && w.wanted(d) && d.state == "up" {
		w.checkMissing(p, d, s)
	}
	if !since(w.freeSince, patience) {
		return
	}
	edited := time.Since(w.admin.editedAt)
	serves := w.wanted(d) && edited > patience && d.state == "up" && time.Since(d.noticed) > patience && s.DampedUntil.IsZero()
	if w.intactSince.IsZero() || !p.recovered(w.foreignAt) {
		return
	}
	refused := ours && n.sock.told != nil && !n.sock.told.Registered && !n.sock.forgotten
	w.wrong(serves && refused && h.tableUntil.After(n.sock.toldAt) && h.tableUntil.After(n.sock.madeAt), d.name, patience,
		"what the kubelet refused is tried again with another table", "%s", &s.Reason)
	_, endpoint := w.announced(d)
	changed := serves && ours && (rec.Announced.Endpoint != endpoint.Endpoint || !slices.Equal(rec.Announced.Versions, endpoint.Versions))
	w.wrong(changed, d.name, patience, "the kubelet is told what the files say", "%+v: %s", &rec.Announced, &s.Reason)
	// Asked during a publication, there is another one before the kubelet answers to the first.
	asked := h.requestedAt.After(p.started) && h.requestedAt.After(d.since) && h.requestedAt.After(w.admin.editedAt)
	answered := ours && !n.sock.toldAt.Before(h.requestedAt) &&
		(n.sock.movedAt.Before(h.requestedAt) || n.sock.toldAt.Sub(n.sock.movedAt) < 700*time.Millisecond)
	w.wrong(serves && ours && asked && n.sock.madeAt.Before(h.requestedAt) && !answered, d.name, patience,
		"what was asked for is done", "reregister had no effect: %s", &s.Reason)
	// 10 s are the grace period, which begins again with each process, and then the next look
	// at the volumes.
	unwanted := !w.wanted(d) && time.Since(h.unmountAt) > 20*time.Second && time.Since(p.started) > config.GracePeriod
	for i, root := range rootDirs {
		there := w.files.nodes[socketIn(root, d.name)]
		gone := there == nil || there.maker != "daemon" || w.lost[socketIn(root, d.name)]
		w.wrong(edited > 20*time.Second && !gone && (root != w.admin.root || unwanted), d.name, patience,
			"what the files do not have is withdrawn", "a socket is in %s: %s", &rootDirs[i], &s.Reason)
	}
	w.wrong(edited > 20*time.Second && len(held) > 0 && unwanted, d.name, patience,
		"what the files do not have is withdrawn", "it is in the descriptor store: %s", &s.Reason)
}

// announced returns what the kubelet is to be told.
func (w *world) announced(d *csiDriver) (ok bool, a status.Announcement) {
	table := w.admin.tables[d.name]
	if table == nil {
		return false, a
	}
	a.Endpoint, a.Versions = table.Endpoint, table.SupportedVersions
	return true, a
}

// tried notes what the process tries, or does again and again.
func (p *process) tried(what string) { p.failures = append(p.failures, failure{time.Now(), what}) }

// checkRetries checks that failed actions are tried again with growing pauses. Called before an
// event, it counts those since the event before.
func (w *world) checkRetries() {
	p := w.process
	for len(p.failures) > 0 && p.failures[0].at.Before(w.eventAt) {
		p.failures = p.failures[1:]
	}
	count := map[string]int{}
	for _, f := range p.failures {
		class := f.path
		if i := strings.LastIndex(class, "/."); i >= 0 {
			class = class[:i]
		}
		most := 25 + int(time.Since(w.eventAt)/(4*time.Second))
		if strings.HasPrefix(class, "asks of ") { // twice a second for 10 s
			most += 20
		}
		// A Check that exceeds its time is repeated when it has ended.
		if w.files.latency > slowDisk || strings.HasPrefix(class, "/r/") {
			most *= 4
		}
		if count[class]++; count[class] > most {
			w.violated("what fails is tried again with growing pauses", "%d times within %s: %s", count[class], time.Since(w.eventAt), class)
			return
		}
	}
}

func (w *world) checkStatus(p *process, d *csiDriver, s *status.Driver, calm bool) {
	n := w.files.nodes[string(s.RegistrationSocket)]
	ours := n != nil && n.sock != nil && n.sock.by == p && n.sock.refs > 0
	told := ours && n.sock.told != nil
	if ours && n.sock.forgotten {
		return // what the kubelet said to the process before was lost
	}
	const rule = "the status is right"
	for _, at := range []time.Time{s.Since, s.RegisteredAt, s.LastGetInfoAt} {
		if at.After(time.Now()) {
			w.violated(rule, "%s: %s has not come yet", s.Name, at)
		}
	}
	w.wrong(calm && s.Registration == status.Registered && !(told && n.sock.told.Registered), s.Name, patience, rule, "%s, and it is not", &s.State)
	w.wrong(calm && s.Registration == status.Refused && !(told && !n.sock.told.Registered), s.Name, patience, rule, "%s, and it was not", &s.State)
	w.wrong(calm && s.Registration == status.None && ours && time.Since(n.sock.movedAt) > patience, s.Name, patience, rule, "%s, and its socket is published (%s)", &s.State, &s.Reason)
	rootAt := w.of(s.Name).rootAt
	moving := time.Since(rootAt) < recovery || w.admin.broken || rootAt.After(p.started) && w.troubled()
	told = told && n.sock.toldAt.After(p.started)
	w.wrong(calm && told && n.sock.told.Registered && s.Registration == status.Registered && !moving &&
		(s.RegisteredAt.After(n.sock.toldAt) || n.sock.toldAt.Sub(s.RegisteredAt) > changeTime), s.Name, patience, rule, "registered at %s", &s.RegisteredAt)
	w.wrong(calm && ours && !moving && n.sock.askedAt.After(p.started) && !s.LastGetInfoAt.Equal(n.sock.askedAt), s.Name, patience, rule, "asked at %s", &s.LastGetInfoAt)
	w.wrong(calm && ours && w.wanted(d) && !moving && string(s.RegistrationSocket) != w.socketOf(s.Name), s.Name, 4*patience, rule, "the socket is %s", &s.RegistrationSocket)
	w.wrong(calm && told && n.sock.madeAt.After(p.started) && s.Registration == status.Registered &&
		(n.sock.acceptedAt.Sub(n.sock.madeAt)-s.Took).Abs() > changeTime, s.Name, patience, rule, "it took %s", &s.Took)
	settled := s.State == status.Disabled || s.State == string(status.Ready) || s.Registration == status.Registered
	moved := ours && time.Since(n.sock.movedAt) < 2*patience
	w.wrong(calm && !settled && !moved && time.Since(s.Since) > 2*patience && s.Reason == "", s.Name, patience, "the status says why", "%s has no reason", &s.State)
	w.checkOthers(d, s, n, calm && ours && !moving)
	w.checkServed(d, s, n, calm && !moving)
	dir := w.files.nodes[w.registry()]
	// The process cannot have seen a directory whose disk has answered only now.
	if calm && ours && dir != nil && p.directory == 0 && time.Since(w.files.mounts["k"].thawedAt) > patience {
		p.directory = dir.Ino
	}
	another := calm && ours && !rootAt.After(p.started) && w.kubelet.running && dir != nil && p.directory != 0 && p.directory != dir.Ino &&
		!w.kubelet.knew[dir.Ino] && w.kubelet.root == w.admin.root && !w.failed[w.registry()]
	w.wrong(another && s.Driver == status.Ready && s.Registration == status.Published && time.Since(n.sock.movedAt) > 2*patience &&
		strings.Contains(s.Reason, "has not asked"), s.Name, patience, "the status says why", "the directory was recreated: %s", &s.Reason)
	table := w.admin.tables[s.Name]
	// one that is withdrawn is asked no more
	asked := table != nil && table.Enabled && s.State != status.Disabled && !w.noSockets && time.Since(w.opensAt) > recovery/2
	back := told && !n.sock.told.Registered && time.Since(d.noticed) > 0 && d.since.After(n.sock.toldAt) && d.since.After(n.sock.askedAt) && d.since.After(p.started.Add(patience))
	w.wrong(calm && asked && back && d.state == "up" && s.Registration == status.Refused && s.DampedUntil.IsZero() && w.files.latency <= slowDisk,
		s.Name, 45*time.Second, "a driver that is back is registered", "%s: %s", &s.State, &s.Reason)
	w.wrong(calm && asked && s.Driver == status.Ready && d.state != "up" && d.state != "hang" && d.state != "slow" && time.Since(d.since) > 15*time.Second,
		s.Name, patience, rule, "the driver is ready, and it is %s", &d.state)
	hangs := calm && asked && ours && d.state == "hang" && table.ProbeEvery > 0
	for _, from := range []time.Time{d.since, w.admin.editedAt, p.started, n.movedAt(), w.files.mounts["k"].thawedAt} {
		hangs = hangs && time.Since(from) > 80*time.Second+2*table.Timeout
	}
	w.wrong(hangs && s.Driver != status.Hanging, s.Name, patience, rule, "the driver is %s, and it hangs", &s.Driver)
	w.wrong(calm && asked && s.Driver != status.Ready && d.state == "up" && time.Since(d.since) > time.Minute,
		s.Name, patience, rule, "the driver is %s, and it is up (%s)", &s.Driver, &s.Reason)
}

// checkOthers: after a refusal the status names who else serves a driver, at another path.
func (w *world) checkOthers(d *csiDriver, s *status.Driver, n *node, published bool) {
	const rule = "the status names who else serves a refused driver"
	other, told := w.files.nodes[w.besides(d)], n != nil && n.sock != nil && n.sock.told != nil && !n.sock.told.Registered
	serves := told && other != nil && other.sock != nil && other.sock.refs > 0 && time.Unix(0, other.Born).Add(patience).Before(n.sock.toldAt)
	refused := published && strings.Contains(s.Reason, "the kubelet refused")
	named := strings.Contains(s.Reason, "already served")
	reads := w.files.latency <= slowDisk && !w.failed[w.besides(d)]
	// It looks again 10 s after a call that failed or did not return.
	w.wrong(refused && serves && reads && !named, s.Name, 3*patience, rule, "it does not: %s", &s.Reason)
	w.wrong(published && named && s.Registration != status.Refused && s.Registration != status.Conflict, s.Name, patience, rule, "it is not refused: %s", &s.Reason)
}

// checkServed: the status names the registrar that serves the driver in place of the daemon, and
// only one that has done so for 15 seconds, and answered 15 seconds ago at most.
func (w *world) checkServed(d *csiDriver, s *status.Driver, n *node, calm bool) {
	const rule = "the status names who serves the driver in its place"
	by := s.ServedBy
	other := n != nil && n.maker == "sidecar" && n.sock.refs > 0
	configured, told := w.announced(d) // without a table the earlier one can be in force
	settled := configured && time.Since(w.admin.editedAt) > recovery
	if by.PID != 0 {
		replaced := other && int(n.Ino) == by.PID && time.Unix(0, n.Born).After(by.Since)
		if s.Registration != status.Conflict || time.Since(by.AskedAt) > 15*time.Second || by.AskedAt.Sub(by.Since) < 15*time.Second || replaced {
			w.violated(rule, "%s: %s, served by %+v", d.name, s.State, by)
		}
		w.wrong(calm && settled && other && n.sock.endpoint != told.Endpoint, s.Name, patience, rule, "it announces another endpoint")
	}
	// While the file system does not answer nobody can be asked, and then 15 seconds have to pass.
	settled = settled && time.Since(w.files.mounts["k"].thawedAt) > recovery
	serves := calm && settled && other && n.sock.endpoint == told.Endpoint && s.Registration == status.Conflict && s.Driver == status.Ready &&
		w.files.latency <= slowDisk && !w.failed[string(s.RegistrationSocket)] && time.Since(time.Unix(0, n.Born)) > recovery
	if serves && time.Since(s.Since) > time.Minute {
		w.seen.states["served by another"]++
		if by.PID != int(n.Ino) {
			w.violated(rule, "%s: it names %+v, not process %d", d.name, by, n.Ino)
		}
	}
}

// unsettled says what is not as it is to be in the end; empty: nothing. Everything is healed.
func (w *world) unsettled(p *process, doc *status.Document) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(doc.Withdrawals) > 0 {
		return fmt.Sprintf("a withdrawal is shown as failed: %+v", doc.Withdrawals)
	}
	for _, d := range w.drivers {
		table := w.admin.tables[d.name]
		n := w.files.nodes[w.socketOf(d.name)]
		ours := n != nil && n.sock != nil && n.sock.by == p && n.sock.refs > 0
		s := shown(doc, d.name)
		id, inNode := w.kubelet.csiNode[d.name]
		clients := 0
		for _, c := range d.clients {
			if c.p == p {
				clients++
			}
		}
		switch {
		case table == nil || !table.Enabled:
			switch {
			case n != nil && !w.failed[w.socketOf(d.name)] && !w.lost[w.socketOf(d.name)]:
				return d.name + " is not enabled, and its socket is there"
			case len(w.pid1.held[storeName(d.name)]) > 0:
				return d.name + " is not enabled, and in the descriptor store"
			case w.files.nodes[recordOf(d.name)] != nil && !w.lost[recordOf(d.name)]:
				return d.name + " is not enabled, and has a record"
			case inNode && w.kubelet.drivers[d.name] && !w.lost[w.socketOf(d.name)]:
				return d.name + " is not enabled, and in the CSINode"
			case s != noStatus && s.State != status.Disabled:
				return d.name + " is not enabled, and shown as " + s.State
			case clients > 0:
				return fmt.Sprintf("%s is not enabled, and has %d connections", d.name, clients)
			}
		case d.state == "down" && table.WhenGone == config.Withdraw:
			if lost := w.lost[w.socketOf(d.name)] && !ours; !lost && (n != nil || inNode && w.kubelet.drivers[d.name]) {
				return d.name + " is gone, and not withdrawn: " + s.State + ": " + s.Reason
			}
		case d.state == "up":
			// A refusal that the process before heard, and could not record, is not known.
			collision := ours && n.sock.told != nil && !n.sock.forgotten && strings.Contains(n.sock.told.Error, "collision")
			if table.Enabled && clients != 1 {
				return fmt.Sprintf("%s has %d connections", d.name, clients)
			}
			if c := d.clients[len(d.clients)-1]; c.timeout != table.Timeout {
				return fmt.Sprintf("%s has %s for an answer, and the files say %s", d.name, c.timeout, table.Timeout)
			}
			_, told := w.announced(d)
			// A process before learned that the kubelet has another limit: see README.md, "Open".
			rec := w.files.nodes[recordOf(d.name)].recorded()
			earlier := w.of(d.name).learnedAt.Before(p.started) && rec.Announced.Identity.MaxVolumes != id.MaxVolumes
			switch {
			case !ours:
				return d.name + " is not published: " + s.State + ": " + s.Reason
			case collision:
				if s.State != string(status.Refused) {
					return d.name + " is refused, and shown as " + s.State
				}
			case w.kubelet.robbed[d.name]: // by the end of another registrar
			// what the kubelet said to the process before was lost
			case n.sock.forgotten:
			case !inNode || !w.kubelet.drivers[d.name]:
				return d.name + " is not registered: " + s.State + ": " + s.Reason
			case id.NodeID != d.id.NodeID && labelsAllow(w, d) && table.WhenLimitChanges != config.Leave:
				return fmt.Sprintf("%s has the node id %q in the CSINode, and is %q: %s", d.name, id.NodeID, d.id.NodeID, s.Reason)
			case s.State != string(status.Registered):
				return d.name + " is registered, and shown as " + s.State + ": " + s.Reason
			case s.NodeID != d.id.NodeID || s.MaxVolumes != d.id.MaxVolumes || s.DriverVersion != d.id.Version:
				return fmt.Sprintf("%s is shown as it was: %+v", d.name, *s)
			case string(s.Endpoint) != told.Endpoint || string(s.Socket) != table.Socket:
				return fmt.Sprintf("%s is shown with an earlier table: %+v", d.name, *s)
			case s.Reason != "" && !strings.Contains(s.Reason, "the driver restarted") && !strings.Contains(s.Reason, "the Node has the old label"):
				return d.name + " is registered, and shown with " + s.Reason
			case (s.KubeletMaxVolumes == nil) != (id.MaxVolumes == d.id.MaxVolumes) && !w.of(d.name).unseen && !earlier:
				return fmt.Sprintf("%s: the kubelet has the limit %d, and status %v", d.name, id.MaxVolumes, s.KubeletMaxVolumes)
			}
		}
	}
	return w.leftBehind(p)
}

// leftBehind names a file of the daemon that it does not need; empty: there is none.
func (w *world) leftBehind(p *process) string {
	needed := map[string]bool{}
	enabled := 0
	for _, d := range w.drivers {
		needed[recordOf(d.name)], needed[w.socketOf(d.name)] = true, true
		if w.wanted(d) {
			enabled++
		}
	}
	for _, root := range append(rootDirs, runDir) {
		for _, name := range w.files.below(root) {
			n := w.files.nodes[name]
			if n.maker == "daemon" && n.mode&syscall.S_IFMT != syscall.S_IFDIR && !needed[name] && !w.failed[name] && !w.lost[name] {
				return "left behind: " + name
			}
		}
	}
	listening := 0
	for _, h := range p.handles {
		if h.open {
			listening++
		}
	}
	if listening > enabled {
		return fmt.Sprintf("%d drivers are enabled, and %d sockets listen", enabled, listening)
	}
	watches := 0
	for _, x := range w.files.watches {
		if x.p == p {
			watches++
		}
	}
	if watches != enabled {
		return fmt.Sprintf("%d drivers are enabled, and %d watched", enabled, watches)
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

func dampedUntil(doc *status.Document) (t time.Time) {
	for i := range doc.Drivers {
		if until := doc.Drivers[i].DampedUntil; until.After(t) {
			t = until
		}
	}
	return t
}
