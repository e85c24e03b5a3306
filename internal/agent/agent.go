// Package agent decides which registrars run: it holds the configuration in force against
// what runs, starts, changes and ends registrars, and keeps the snapshot of them all.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/registrar"
	"csi-registrar/internal/status"
)

// leaveTime is how long Apply waits for what is withdrawn. It takes milliseconds; what takes
// longer is tried on in the background.
const leaveTime = 2 * time.Second

// Socket is a registration socket, and how it ends.
type Socket interface {
	registrar.Socket
	// Close ends the listener with the process; whether the path stays is the
	// socket's own rule (descriptor store, --keep-sockets). It takes a limited time.
	Close(ctx context.Context) error
}

// Parts makes what a registrar needs, for a configuration that is about to be in force.
type Parts interface {
	Driver(d config.Driver) registrar.Driver
	// Socket may wait, for a limited time; it is called for several drivers at once.
	Socket(ctx context.Context, c *config.Config, name string) (Socket, error)
}

// Agent is made with New; Run must run for anything else to answer.
type Agent struct {
	log    *slog.Logger
	parts  Parts
	store  *statusStore
	cmds   chan func()
	done   chan struct{} // closed when Run no longer takes commands
	applyM sync.Mutex    // one Apply at a time

	// All below belongs to the goroutine that is in Run.
	ctx     context.Context // of the registrars
	ended   sync.WaitGroup  // of the registrars
	config  *config.Config
	running map[key]*running
}

// key is what can be registered once: a driver with one kubelet. While a registration is
// withdrawn under an earlier root_dir its driver has two registrars.
type key struct {
	name    string
	kubelet config.Kubelet
}

// running is one registrar and what belongs to it.
type running struct {
	key
	driver config.Driver // not enabled: its registration is being withdrawn
	reg    *registrar.Registrar
	socket Socket
	ended  chan struct{} // closed when all of it has ended
}

// Options are the Agent's surroundings.
type Options struct {
	Log     *slog.Logger
	Parts   Parts
	Version string
}

// New makes an agent without any driver.
func New(o Options) *Agent {
	return &Agent{
		log: o.Log, parts: o.Parts,
		store:   newStatusStore(o.Version, time.Now()),
		cmds:    make(chan func()),
		done:    make(chan struct{}),
		config:  config.Default(),
		running: map[key]*running{},
	}
}

// Run serves until ctx is done; then it ends all registrars, which close their sockets
// (each of which knows whether its path stays).
func (a *Agent) Run(ctx context.Context) error {
	var stop context.CancelFunc
	a.ctx, stop = context.WithCancel(context.WithoutCancel(ctx))
	defer a.ended.Wait()
	defer stop()
	defer close(a.done)
	for {
		select {
		case <-ctx.Done():
			return nil
		case cmd := <-a.cmds:
			cmd()
		}
	}
}

// do runs f in the agent's goroutine and waits for it.
func (a *Agent) do(ctx context.Context, f func()) error {
	ran := make(chan struct{})
	select {
	case a.cmds <- func() { f(); close(ran) }:
		<-ran
		return nil
	case <-a.done:
		return errors.New("the agent has ended")
	case <-ctx.Done():
		return fmt.Errorf("the agent does not answer: %w", context.Cause(ctx))
	}
}

// Apply brings what runs in line with c, of the given files. Only what changed is touched;
// a driver that c does not name is withdrawn. The error names drivers that could not be
// started, or not be withdrawn yet; all others are.
func (a *Agent) Apply(ctx context.Context, c *config.Config, files []string) error {
	a.applyM.Lock()
	defer a.applyM.Unlock()
	var left []*running
	err := a.do(ctx, func() {
		for k, r := range a.running {
			d, there := c.Driver(k.name)
			if r.driver.Enabled && !(there && d.Enabled && k.kubelet == c.Kubelet) { // another root_dir: every path is another
				left = append(left, r)
				d = r.driver
				d.Enabled = false
				a.update(k, d)
			}
		}
		a.config = c
		a.store.configured(c, files)
	})
	if err != nil {
		return err
	}
	late := a.awaitLeft(ctx, left)
	var missing []config.Driver
	err = a.do(ctx, func() {
		for _, d := range c.Drivers {
			if d.Enabled && !a.update(key{d.Name, c.Kubelet}, d) {
				missing = append(missing, d)
			}
		}
	})
	_, failed := a.startAll(ctx, c, missing)
	return errors.Join(late, err, failed)
}

// WithdrawKept withdraws the registrations of drivers that are not enabled, of which
// an earlier process left the registration socket.
func (a *Agent) WithdrawKept(ctx context.Context, names []string) error {
	a.applyM.Lock()
	defer a.applyM.Unlock()
	var c *config.Config
	err := a.do(ctx, func() { c = a.config })
	if err != nil {
		return err
	}
	kept := make([]config.Driver, len(names))
	for i, name := range names {
		kept[i].Name = name
	}
	left, err := a.startAll(ctx, c, kept)
	return errors.Join(err, a.awaitLeft(ctx, left))
}

// nobody is the driver of a registration that is only to be withdrawn.
type nobody struct{}

func (nobody) Ask(context.Context, func(status.Report)) status.Report { return status.Report{} }
func (nobody) Hints() <-chan struct{}                                 { return nil }
func (nobody) Close() error                                           { return nil }

// startAll starts registrars for drivers that have none. One that is not enabled is only
// withdrawn. If the agent has ended their sockets are closed.
func (a *Agent) startAll(ctx context.Context, c *config.Config, drivers []config.Driver) (started []*running, err error) {
	sockets, errs := make([]Socket, len(drivers)), make([]error, len(drivers))
	var made sync.WaitGroup
	for i, d := range drivers {
		made.Go(func() {
			if sockets[i], errs[i] = a.parts.Socket(ctx, c, d.Name); errs[i] != nil {
				errs[i] = fmt.Errorf("cannot start the registrar of %s: %w", d.Name, errs[i])
			}
		})
	}
	made.Wait()
	err = a.do(context.WithoutCancel(ctx), func() {
		for i, d := range drivers {
			if errs[i] == nil {
				started = append(started, a.start(key{d.Name, c.Kubelet}, d, sockets[i]))
			}
		}
	})
	for i := range drivers {
		if err != nil && errs[i] == nil {
			errs[i] = sockets[i].Close(ctx)
		}
	}
	return started, errors.Join(append(errs, err)...)
}

func (a *Agent) start(k key, d config.Driver, socket Socket) *running {
	r := &running{key: k, driver: d, socket: socket, ended: make(chan struct{})}
	a.running[k] = r
	var driver registrar.Driver = nobody{}
	if d.Enabled {
		driver = a.parts.Driver(d)
	}
	log := a.log.With("driver", d.Name)
	r.reg = registrar.New(settings(d), driver, socket, registrar.Options{
		Log: log, Observe: func(s status.Driver) { a.store.set(k, &s) },
	})
	ctx := a.ctx
	a.ended.Go(func() {
		defer close(r.ended)
		r.reg.Run(ctx)
		if err := socket.Close(context.WithoutCancel(ctx)); err != nil {
			log.Error("cannot end a registration cleanly", "error", err)
		}
		select {
		case a.cmds <- func() { a.forget(r) }:
		case <-a.done:
		}
	})
	return r
}

// forget removes what has ended, unless another took its place.
func (a *Agent) forget(r *running) {
	if a.running[r.key] == r {
		delete(a.running, r.key)
		a.store.set(r.key, nil)
	}
}

// awaitLeft waits until they are withdrawn, for a while.
func (a *Agent) awaitLeft(ctx context.Context, left []*running) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	var errs []error
	for _, r := range left {
		select {
		case <-r.ended:
			continue
		case <-ctx.Done():
		}
		select {
		case <-r.ended:
		default:
			d, _ := a.Status().Driver(r.name)
			errs = append(errs, fmt.Errorf("%s is not withdrawn yet, trying again: %s", r.name, d.Reason))
		}
	}
	return errors.Join(errs...)
}

// update hands a changed table to its registrar, if there is one; a driver that is found or
// trusted in another way gets a new client, the registration socket stays. One that could not
// be withdrawn yet goes on.
func (a *Agent) update(k key, d config.Driver) bool {
	r := a.running[k]
	if r == nil || r.driver.Equal(d) {
		return r != nil
	}
	var client registrar.Driver
	if o := r.driver; o.Socket != d.Socket || o.Endpoint != d.Endpoint || o.SocketOwner != d.SocketOwner || o.Timeout != d.Timeout {
		client = a.parts.Driver(d)
	}
	if err := r.reg.Update(a.ctx, settings(d), client); err != nil {
		// It was withdrawn at this very moment.
		a.log.Debug("a registrar ended before it could be changed", "driver", d.Name, "error", err)
		if client != nil {
			if err := client.Close(); err != nil {
				a.log.Debug("closing the connection to the driver", "driver", d.Name, "error", err)
			}
		}
		return false
	}
	r.driver = d
	return true
}

func settings(d config.Driver) registrar.Settings {
	return registrar.Settings{
		Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, Versions: d.SupportedVersions, Leaving: !d.Enabled,
		Withdraw: d.WhenGone == config.Withdraw, WithdrawAfter: d.WithdrawAfter,
	}
}

// Reregister makes the driver's registration socket again. ErrUnknown if there is no such
// driver.
func (a *Agent) Reregister(ctx context.Context, name string) error {
	var reg *registrar.Registrar
	err := a.do(ctx, func() {
		if r := a.running[key{name, a.config.Kubelet}]; r != nil && r.driver.Enabled {
			reg = r.reg
		}
	})
	switch {
	case err != nil:
		return err
	case reg == nil:
		return fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	return reg.Reregister(ctx)
}

// ErrUnknown is wrapped where a driver is asked for that does not run.
var ErrUnknown = errors.New("no enabled driver of that name is configured")

// Alive returns nil if the agent and every registrar really run, whatever their drivers do. It
// causes no look at anything. All are asked at once: on a starved machine the slow ones add up.
func (a *Agent) Alive(ctx context.Context) error {
	var regs []*registrar.Registrar
	err := a.do(ctx, func() {
		for _, r := range a.running {
			regs = append(regs, r.reg)
		}
	})
	return errors.Join(err, allAlive(ctx, regs))
}

// allAlive asks registrars. One that has ended meanwhile was withdrawn: they end in no
// other way.
func allAlive(ctx context.Context, regs []*registrar.Registrar) error {
	errs := make([]error, len(regs))
	var asked sync.WaitGroup
	for i, r := range regs {
		asked.Go(func() {
			if err := r.Alive(ctx); !errors.Is(err, registrar.ErrEnded) {
				errs[i] = err
			}
		})
	}
	asked.Wait()
	return errors.Join(errs...)
}
