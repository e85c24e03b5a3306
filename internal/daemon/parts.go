package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// parts creates what the registrars need, and has what they share: the plugin registry, and the
// listeners from the descriptor store until a driver claims them.
type parts struct {
	log     *slog.Logger
	watcher *fswatch.Watcher
	pool    *worker.Pool
	options regsocket.Options
	store   *systemd.Store
	kubelet *regsocket.Process

	registry *regsocket.Registry // set by open

	mu     sync.Mutex
	stored map[string][]*os.File // by driver; more than one only if a process died between two
}

// newParts creates the parts, with the passed descriptors. registryDir is empty unless the
// directory is not the plugins_registry of the configured root directory.
func newParts(d *daemon, registryDir string) *parts {
	p := &parts{
		log: d.log, watcher: d.watcher, pool: d.pool,
		stored: d.handed.stored,
	}
	p.options = regsocket.Options{
		Log:         d.log,
		KeepSockets: d.options.KeepSockets,
		Dir:         registryDir,
		Watch:       func(paths ...string) regsocket.Watch { return d.watcher.Subscribe(paths...) },
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

// Driver implements agent.Parts.
func (p *parts) Driver(d config.Driver) registrar.Driver {
	if p.options.Dir != "" {
		// node-driver-registrar's flag is a path of the host, which need not be the same path in
		// our mount namespace: it is not checked.
		d.Endpoint = d.Socket
	}
	return driver.Observe(driver.New(d.Connection, p.log.With("driver", d.Name), p.watcher.Subscribe(d.Socket, d.Endpoint), p.pool))
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

// disown closes the stored listeners of drivers that c does not name, or has disabled, and names
// these. The store still has them.
func (p *parts) disown(c *config.Config) []string {
	names := p.unclaimed(c)
	for _, name := range names {
		for _, f := range p.claim(name) {
			_ = f.Close() // a copy of what the store has; no error of it matters
		}
	}
	return names
}

// removeLeftovers removes what an earlier process left of drivers that c does not name, or has
// disabled; names are those of which the store has a listener.
func (p *parts) removeLeftovers(ctx context.Context, c *config.Config, names []string) error {
	var enabled []string
	for _, d := range c.Drivers {
		if d.Enabled {
			enabled = append(enabled, d.Name)
		} else {
			names = append(names, d.Name)
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
	if p.registry != nil {
		errs = append(errs, p.registry.Close(ctx))
	}
	for _, files := range p.stored {
		for _, f := range files {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
