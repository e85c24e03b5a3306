package daemon

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// Run runs the daemon with configuration files until ctx is done.
func Run(ctx context.Context, o Options) error { return run(ctx, o, config.Load, config.GracePeriod) }

func run(ctx context.Context, o Options, load func(config.Source) *config.Result, period time.Duration) error {
	pool := worker.NewPool()
	r := newReloader(pool, o.Source, load)
	r.grace.Period = period
	res := r.read(ctx)
	log := newLogger(o.Stderr, res.Config.Log)
	defer log.queue.Close()
	d := newDaemon(o, log, pool, "")
	defer d.notifier.Close()
	r.daemon, r.level = d, log.level
	return d.run(ctx, backend{d.agent, d, r.reload}, func(ctx context.Context) error {
		close(d.watch)
		if err := r.begin(ctx, res); err != nil {
			return err
		}
		d.work.Go(func() { r.follow(ctx) })
		d.work.Go(func() { r.removeLeftovers(ctx) })
		d.onHangup(ctx, func() {
			_, err := r.reload(ctx, false)
			d.note("reload the configuration", err)
		})
		return nil
	})
}

// begin puts the first configuration in force. If the files have errors, it uses the last good
// configuration or, if there is none, the valid part of the files.
func (r *configReloader) begin(ctx context.Context, res *config.Result) error {
	if err := os.MkdirAll(stateDir(r.options.runDir()), 0o755); err != nil {
		r.log.Warn("cannot keep state over a restart", "error", err)
	}
	r.lastGood = filepath.Join(stateDir(r.options.runDir()), lastGoodName(r.source))
	c, before := res.InForce(), &config.InForce{Config: config.Default()}
	good, err := config.LoadLastGood(r.lastGood)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("starting without the last good configuration", "error", err)
	}
	volumes := r.newVolumeCount(ctx, c.Kubelet.RootDir, false)
	if len(res.Errors) == 0 && good != nil {
		before = served(good, r.parts.unclaimed(c.Config))
		volumes = r.newVolumeCount(ctx, good.Kubelet.RootDir, false)
		c = r.keep(res, before, false, volumes)
		r.checkRootDir(ctx, res, c, good, volumes)
	}
	r.partial = good == nil && len(res.Errors) > 0
	r.report(res, good)
	switch {
	case r.partial:
		r.log.Warn("starting with the valid part of the configuration files", "drivers", len(c.Drivers), "left_out", res.Faulty)
	case len(res.Errors) > 0:
		c = good
		r.log.Warn("starting with the last good configuration", "drivers", len(c.Drivers))
	}
	roots := []string{c.Kubelet.RootDir}
	if good != nil { // what is left there has to be removed
		roots = append(roots, good.Kubelet.RootDir)
	}
	r.confine(ctx, roots...)
	if err := r.parts.open(c.Kubelet.RootDir); err != nil {
		return err
	}
	r.apply(ctx, c, before, len(res.Errors) == 0, volumes)
	return nil
}

// served returns the last good configuration with only those drivers whose registration sockets are
// in the descriptor store: the grace period delays a withdrawal, but registers nothing.
func served(good *config.InForce, stored []string) *config.InForce {
	c := *good.Config
	c.Drivers = slices.DeleteFunc(slices.Clone(c.Drivers), func(d config.Driver) bool {
		return !slices.Contains(stored, d.Name)
	})
	// The files no longer have socket_owner, and a value that an earlier process wrote must not
	// relax the check. The check must not end the registration either, which the owner may serve.
	for i := range c.Drivers {
		d := &c.Drivers[i]
		owner := config.DefaultDriver(d.Name, d.Socket).SocketOwner
		d.SocketOwner, d.OwnerUnknown = owner, d.OwnerUnknown || d.SocketOwner != owner
	}
	return &config.InForce{Config: &c, Files: good.Files, RootDirFile: good.RootDirFile}
}

// lastGoodName returns the name of the file: one for the directories, one for each --config FILE.
func lastGoodName(s config.Source) string {
	if s.File == "" {
		return "last-good.json"
	}
	h := fnv.New32a()
	h.Write([]byte(s.File))
	return fmt.Sprintf("last-good-%08x.json", h.Sum32())
}

// parts creates what the registrars need, and has what they share: the plugin registry, and the
// listeners from the descriptor store until a driver claims them.
type parts struct {
	*daemon
	options regsocket.Options
	store   *systemd.Store
	kubelet *regsocket.Process

	registry *regsocket.Registry // set by open

	mu     sync.Mutex
	stored map[string][]*os.File // by driver; more than one only if a process died between two
	named  registrar.Driver      // the sidecar's, until it has a registrar; nil: none
}

// newParts creates the parts, with the passed descriptors. registryDir is empty unless the
// directory is not the plugins_registry of the configured root directory.
func newParts(d *daemon, registryDir string) *parts {
	p := &parts{daemon: d, stored: d.handed.stored}
	p.options = regsocket.Options{
		Log:         d.log,
		KeepSockets: d.options.KeepSockets,
		Dir:         registryDir,
		Watch:       func(paths ...string) rate.Hinter { return d.watcher.Subscribe(paths...) },
		Pool:        d.pool,
	}
	p.store = systemd.NewStore(d.notifier, systemd.StoreOptions{
		Max: systemd.StoreMax(d.options.Getenv), Held: d.handed.held, Log: d.log,
	})
	// Without --keep-sockets nothing may outlive the process, but descriptors that are already
	// in the store must be removed from it.
	if d.options.KeepSockets || len(p.stored) > 0 {
		p.options.RunDir = d.options.runDir()
		if d.notifier != nil {
			p.options.Store = p.store
		}
	}
	p.kubelet = regsocket.NewProcess(d.log, p.options.RunDir, func(k status.Kubelet) { d.agent.Kubelet(k) })
	p.options.Process = p.kubelet
	return p
}

// open opens the plugin registry below rootDir. It is called once, before the first Socket.
func (p *parts) open(rootDir string) (err error) {
	p.registry, err = regsocket.Open(rootDir, p.options)
	return err
}

// Driver implements agent.Parts. The sidecar's registrar continues with the driver that was asked
// for its name: another connection and other watches would take as long as the rest of the start.
func (p *parts) Driver(d config.Driver) registrar.Driver {
	p.mu.Lock()
	defer p.mu.Unlock()
	if named := p.named; named != nil {
		p.named = nil
		return named
	}
	if p.options.Dir != "" {
		// node-driver-registrar's flag is a path of the host, which need not be the same path in
		// our mount namespace: it is not checked.
		d.Endpoint = d.Socket
	}
	return driver.Observe(driver.New(d.Connection, p.log, p.watcher.Subscribe(d.Socket, d.Endpoint), p.pool))
}

// Socket implements agent.Parts: a listener that the store kept is adopted.
func (p *parts) Socket(ctx context.Context, name string) (agent.Socket, error) {
	s, err := p.registry.Socket(name)
	if err != nil {
		return nil, err
	}
	err = s.Adopt(ctx, p.claim(name))
	if err != nil && ctx.Err() != nil { // asked to stop: it stays in the store for the next process
		return nil, errors.Join(err, s.Close(context.WithoutCancel(ctx), false))
	}
	if err != nil {
		p.log.Warn("the registration socket of an earlier process, if there is one, is not adopted yet", "driver", name, "error", err)
	}
	return s, nil
}

func (p *parts) claim(name string) []*os.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	files := p.stored[name]
	delete(p.stored, name)
	return files
}

// unclaimed names the stored listeners of drivers that c does not name, or has disabled.
func (p *parts) unclaimed(c *config.Config) (names []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name := range p.stored {
		if d, _ := c.Driver(name); !d.Enabled {
			names = append(names, name)
		}
	}
	return names
}

// removeLeftovers removes what an earlier process left of drivers that c does not name, or has
// disabled; names are those of which the store has a listener. A socket that neither the store nor
// a record names may be that of another registrar.
func (p *parts) removeLeftovers(ctx context.Context, c *config.Config, names []string) error {
	var enabled []string
	for _, d := range c.Drivers {
		if d.Enabled {
			enabled = append(enabled, d.Name)
		}
	}
	return p.registry.RemoveLeftovers(ctx, enabled, names)
}

// close ends the registry; all sockets are closed already. Listeners that no driver claimed stay
// in the store for the next process.
func (p *parts) close(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	errs := []error{p.kubelet.Close()}
	if p.named != nil {
		p.named.Close()
	}
	if p.registry != nil {
		p.registry.Close(ctx)
	}
	for _, files := range p.stored {
		for _, f := range files {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
