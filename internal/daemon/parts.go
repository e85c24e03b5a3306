package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"csi-registrar/internal/agent"
	"csi-registrar/internal/config"
	"csi-registrar/internal/driver"
	"csi-registrar/internal/fswatch"
	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/registrar"
	"csi-registrar/internal/systemd"
	"csi-registrar/internal/worker"
)

// parts makes what the registrars need, and keeps what they share: a plugin registry for
// each root directory, and the listeners that the descriptor store gave back until a
// driver claims them.
type parts struct {
	log     *slog.Logger
	watcher *fswatch.Watcher
	pool    *worker.Pool
	options kubelet.Options
	store   *systemd.Store

	mu         sync.Mutex
	registries map[string]*kubelet.Registry // by root directory
	stored     map[string][]*os.File        // by driver; more than one only if a process died between two
}

// newParts takes the stored listeners out of what was handed over. A directory is given
// where it is not the plugins_registry of the configured root directory.
func newParts(d *daemon, registryDir string) *parts {
	p := &parts{
		log: d.log, watcher: d.watcher, pool: d.pool,
		registries: map[string]*kubelet.Registry{},
		stored:     map[string][]*os.File{},
	}
	p.options = kubelet.Options{
		Log:         d.log,
		KeepSockets: d.options.KeepSockets,
		Dir:         registryDir,
		Watch:       func(paths ...string) kubelet.Watch { return d.watcher.Subscribe(paths...) },
		WatchDir:    func(path string) kubelet.Watch { return d.watcher.SubscribeDir(path) },
		Pool:        d.pool,
	}
	var held []string
	for _, fdName := range d.handed.Names() {
		name, ours := strings.CutPrefix(fdName, kubelet.StorePrefix)
		if !ours {
			continue
		}
		p.stored[name] = d.handed.Take(fdName)
		held = append(held, slices.Repeat([]string{fdName}, len(p.stored[name]))...)
	}
	p.store = systemd.NewStore(d.notifier, systemd.StoreOptions{
		Max: systemd.StoreMax(d.options.Getenv), Held: held, Log: d.log,
	})
	// Without --keep-sockets nothing is to outlive the process; but what the store has
	// already must be taken out of it.
	if d.options.KeepSockets || len(p.stored) > 0 {
		p.options.RunDir = d.options.runDir()
		if d.notifier != nil {
			p.options.Store = p.store
		}
	}
	return p
}

// registry is the plugin registry below rootDir.
func (p *parts) registry(rootDir string) (*kubelet.Registry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.registries[rootDir]; r != nil {
		return r, nil
	}
	r, err := kubelet.Open(rootDir, p.options)
	if err != nil {
		return nil, err
	}
	p.registries[rootDir] = r
	return r, nil
}

var _ agent.Parts = (*parts)(nil)

// Driver implements agent.Parts.
func (p *parts) Driver(d config.Driver) registrar.Driver {
	return driver.New(driver.Config{
		Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, Timeout: d.Timeout, Owner: d.SocketOwner,
		AnyEndpoint: p.options.Dir != "",
	}, driver.Options{Log: p.log.With("driver", d.Name), Hints: p.watcher.Subscribe(d.Socket, d.Endpoint), Pool: p.pool})
}

// Socket implements agent.Parts: a listener that the store kept is adopted.
func (p *parts) Socket(ctx context.Context, c *config.Config, name string) (agent.Socket, error) {
	r, err := p.registry(c.Kubelet.RootDir)
	if err != nil {
		return nil, err
	}
	s, err := r.Socket(name)
	if err != nil {
		return nil, err
	}
	err = s.Adopt(ctx, p.claim(name))
	if err != nil && ctx.Err() != nil { // asked to stop: it stays in the store for the next process
		return nil, errors.Join(err, s.Close(context.WithoutCancel(ctx)))
	}
	if err != nil {
		p.log.Warn("cannot go on with the registration socket of an earlier process", "driver", name, "error", err)
	}
	return volumeSocket{s, p, c.Kubelet.RootDir, name}, nil
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

// sweep removes stale sockets under the names of the configured drivers.
func (p *parts) sweep(ctx context.Context, c *config.Config) error {
	r, err := p.registry(c.Kubelet.RootDir)
	if err != nil {
		return err
	}
	names := make([]string, len(c.Drivers))
	for i, d := range c.Drivers {
		names[i] = d.Name
	}
	removed, err := r.Sweep(ctx, names)
	for _, path := range removed {
		p.log.Info("removed a stale socket", "path", path)
	}
	return err
}

// close ends the registries; all sockets are closed already. What nobody claimed stays
// in the store for the next process.
func (p *parts) close(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, r := range p.registries {
		errs = append(errs, r.Close(ctx))
	}
	for _, files := range p.stored {
		for _, f := range files {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
