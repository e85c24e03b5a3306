package simulation

import (
	"context"
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
	registered := n != nil && n.sock != nil && n.sock.by == p && n.sock.told != nil && n.sock.told.Registered && rec.of(n)
	loses := registered && rec.Announced.Identity.Topology["zone."+d.name] != d.id.Topology["zone."+d.name]
	return d.state == "up" && (force || !loses), d.state == "down" || d.state == "up" && !force && loses
}
