package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// parts creates what the registrars need, and has what they share: a plugin registry for each
// root directory in use, and the listeners from the descriptor store until a driver claims them.
type parts struct {
	log     *slog.Logger
	watcher *fswatch.Watcher
	pool    *worker.Pool
	options kubelet.Options
	store   *systemd.Store
	kubelet *kubelet.Process

	closing sync.WaitGroup // of registries that are no longer used

	mu         sync.Mutex            // guards the fields below
	rootDir    string                // of the configuration in force
	registries map[string]*registry  // by root directory
	stored     map[string][]*os.File // by driver; more than one only if a process died between two
}

// registry is a plugin registry with the number of its users.
type registry struct {
	*kubelet.Registry
	users int
}

// newParts creates the parts, with the passed descriptors. registryDir is empty unless the
// directory is another one than the plugins_registry of the configured root directory.
func newParts(d *daemon, registryDir string) *parts {
	p := &parts{
		log: d.log, watcher: d.watcher, pool: d.pool,
		registries: map[string]*registry{},
		stored:     d.handed.stored,
	}
	p.options = kubelet.Options{
		Log:         d.log,
		KeepSockets: d.options.KeepSockets,
		Dir:         registryDir,
		Watch:       func(paths ...string) kubelet.Watch { return d.watcher.Subscribe(paths...) },
		WatchDir:    func(path string) kubelet.Watch { return d.watcher.SubscribeDir(path) },
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
	p.kubelet = kubelet.NewProcess(kubelet.ProcessOptions{
		Log: d.log, Store: p.options.Store, RunDir: p.options.RunDir, Observe: func(k status.Kubelet) { d.agent.Kubelet(k) },
	})
	p.options.Process = p.kubelet
	return p
}

// open returns the plugin registry below rootDir, the root_dir in force from now on. The caller
// must release it.
func (p *parts) open(rootDir string) (*kubelet.Registry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rootDir = rootDir
	r := p.registries[rootDir]
	if r == nil {
		opened, err := kubelet.Open(rootDir, p.options)
		if err != nil {
			return nil, err
		}
		r = &registry{Registry: opened}
		p.registries[rootDir] = r
	}
	r.users++
	return r.Registry, nil
}

// release closes registries without users, but not the one of the root directory in force.
func (p *parts) release(rootDir string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.registries[rootDir].users--
	for dir, r := range p.registries {
		if r.users > 0 || dir == p.rootDir {
			continue
		}
		delete(p.registries, dir)
		p.closing.Go(func() {
			if err := r.Close(context.Background()); err != nil { // it has its own time limit
				p.log.Warn("closing the registry of an earlier root_dir", "root_dir", dir, "error", err)
			}
		})
	}
}

// Driver implements agent.Parts.
func (p *parts) Driver(d config.Driver) registrar.Driver {
	return driver.New(d.Connection, driver.Options{
		Log: p.log.With("driver", d.Name), Hints: p.watcher.Subscribe(d.Socket, d.Endpoint), Pool: p.pool,
		AnyEndpoint: p.options.Dir != "",
	})
}

// Socket implements agent.Parts: a listener that the store kept is adopted.
func (p *parts) Socket(ctx context.Context, c *config.Config, name string) (agent.Socket, error) {
	root := c.Kubelet.RootDir
	r, err := p.open(root)
	if err != nil {
		return nil, err
	}
	opened, err := r.Socket(name)
	if err != nil {
		p.release(root)
		return nil, err
	}
	s := &volumeSocket{Socket: opened, parts: p, rootDir: root, name: name}
	err = s.Adopt(ctx, p.claim(name))
	if err != nil && ctx.Err() != nil { // asked to stop: it stays in the store for the next process
		return nil, errors.Join(err, s.Close(context.WithoutCancel(ctx)))
	}
	if err != nil {
		p.log.Warn("the registration socket of an earlier process is not adopted yet", "driver", name, "error", err)
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

// sweep removes stale sockets under the names of the configured drivers and, if c is complete,
// those of other drivers that an earlier process left.
func (p *parts) sweep(ctx context.Context, c *config.Config, complete bool) error {
	r, err := p.open(c.Kubelet.RootDir)
	if err != nil {
		return err
	}
	defer p.release(c.Kubelet.RootDir)
	var names, enabled []string
	for _, d := range c.Drivers {
		names = append(names, d.Name)
		if d.Enabled {
			enabled = append(enabled, d.Name)
		}
	}
	removed, err := r.Sweep(ctx, names)
	if complete {
		more, moreErr := r.SweepRecords(ctx, enabled)
		removed, err = append(removed, more...), errors.Join(err, moreErr)
	}
	for _, path := range removed {
		p.log.Info("removed a stale socket", "path", path)
	}
	return err
}

// close ends the registries; all sockets are closed already. Listeners that no driver claimed stay
// in the store for the next process.
func (p *parts) close(ctx context.Context) error {
	p.closing.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, r := range p.registries {
		errs = append(errs, r.Close(ctx))
	}
	errs = append(errs, p.kubelet.Close())
	for _, files := range p.stored {
		for _, f := range files {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
