package simulation

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"csi-registrar/internal/node/config"
)

// admin is who writes the configuration files, and calls the commands.
type admin struct {
	w        *world
	tables   map[string]*config.Driver // by driver; nil: not in the files
	root     string                    // root_dir
	editedAt time.Time
	broken   bool
	lastGood *config.InForce // what the daemon keeps in /run
	traces   map[string]*recorder
}

// result is what config.Load makes of the files.
func (a *admin) result() *config.Result {
	c := config.Default()
	c.Kubelet.RootDir = a.root
	r := &config.Result{Config: c, Files: []string{"/etc/csi-registrar/config.toml"}}
	for _, name := range sortedKeys(a.tables) {
		c.Drivers = append(c.Drivers, *a.tables[name])
	}
	if a.broken {
		r.Errors = config.Errors{{File: r.Files[0], Line: 1, Problem: "cannot be read"}}
	}
	return r
}

// edited gives the daemon the hint that the files changed.
func (a *admin) edited() {
	a.editedAt = time.Now()
	if p := a.w.process; p != nil {
		select {
		case p.hints <- struct{}{}:
		default:
		}
	}
}

// reload and reregister are the commands, which wait for at most 10 s.
func (a *admin) reload() {
	p := a.w.process
	if p == nil {
		return
	}
	go func() {
		done := make(chan error, 1)
		select {
		case p.requests <- done:
		case <-p.done:
		case <-time.After(10 * time.Second):
		}
	}()
}

func (a *admin) reregister(driver string, force bool) {
	p := a.w.process
	if p == nil {
		return
	}
	w := a.w
	w.of(driver).reregistered++
	w.of(driver).calledAt = time.Now()
	w.of(driver).asking++
	allowed, forbidden := w.mayReregister(p, w.driver(driver), force)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		began := time.Now()
		err := p.agent.Reregister(ctx, driver, force)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.of(driver).asking--
		if err == nil {
			w.of(driver).requestedAt, w.of(driver).acceptedAt = began, time.Now()
		}
		if now := time.Since(began) < time.Second && w.process == p; now && (allowed && err != nil || forbidden && err == nil) {
			w.violated("reregister does what it can", "%s (force %t): %v", driver, force, err)
		}
	}()
}

// mayReregister reports whether reregister must succeed, or must fail; neither if it depends on
// what the daemon has noticed.
func (w *world) mayReregister(p *process, d *csiDriver, force bool) (allowed, forbidden bool) {
	h := w.of(d.name)
	if !w.wanted(d) || !w.undamaged() || !p.recovered(w.damagedAt) || !p.recovered(w.opensAt) || !p.recovered(h.rootAt) ||
		time.Since(p.started) < patience || time.Since(w.admin.editedAt) < 4*patience || time.Since(d.noticed) < 15*time.Second {
		return false, false
	}
	n, rec := w.files.nodes[w.socketOf(d.name)], w.files.nodes[recordOf(d.name)].recorded()
	registered := n != nil && n.sock != nil && n.sock.by == p && n.sock.told != nil && n.sock.told.Registered && rec.Bound == n.sock.bound
	loses := registered && rec.Announced.Identity.Topology["zone."+d.name] != d.id.Topology["zone."+d.name]
	return d.state == "up" && (force || !loses), d.state == "down" || d.state == "up" && !force && loses
}

// recorder is `csi-registrar trace`: it has a lease for as long as its request is open.
type recorder struct {
	driver    *csiDriver
	p         *process
	path      string
	listening bool
	linked    bool // the calls arrive
	leased    bool // the request is open
	cancel    context.CancelFunc
}

func (a *admin) beginTrace(d *csiDriver) {
	p := a.w.process
	if p == nil || a.traces[d.name] != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &recorder{driver: d, p: p, leased: true, cancel: cancel}
	a.traces[d.name] = r
	w := a.w
	go func() {
		err := p.agent.Record(ctx, d.name, func(_ context.Context, path string) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.files.nodes[filepath.Dir(path)] == nil || !r.leased {
				return errors.New("there is no directory")
			}
			r.path, r.listening = path, true
			w.recorders[path] = r
			w.files.put(path, &node{mode: 0o140600, maker: "recorder", sock: &sock{bound: path, refs: 1}})
			return nil
		}, func() { w.mu.Lock(); r.linked = true; w.mu.Unlock() })
		_ = err
		w.mu.Lock()
		defer w.mu.Unlock()
		w.endTrace(r, false)
	}()
}

// endTrace ends the recorder's process. In order it removes its socket, which a process that is
// killed leaves to the daemon: at the latest to its next start, if the file system does not answer.
func (w *world) endTrace(r *recorder, killed bool) {
	r.cancel()
	r.leased = false
	if r.listening {
		r.listening = false
		m := w.files.mounts["k"]
		hangs := m.hang != nil || len(m.stalled) > 0 // and its removal, too
		switch n := w.files.nodes[r.path]; {
		case n == nil:
		case !killed && !hangs:
			w.files.drop(r.path)
		default:
			n.sock.refs = 0
			w.lost[r.path] = w.troubled()
		}
	}
	if w.admin.traces[r.driver.name] == r {
		delete(w.admin.traces, r.driver.name)
	}
}
