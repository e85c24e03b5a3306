// Package agent decides which registrars run: it holds the configuration in force against
// what runs, starts, changes and ends registrars, and keeps the snapshot of them all.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
	Driver(c *config.Config, d config.Driver) registrar.Driver
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
	running map[string]*running
	leaving map[*running]struct{} // being withdrawn
}

// running is one registrar and what belongs to it.
type running struct {
	kubelet config.Kubelet
	driver  config.Driver
	reg     *registrar.Registrar
	socket  Socket
	ended   chan struct{} // closed when all of it has ended
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
		running: map[string]*running{},
		leaving: map[*running]struct{}{},
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
	var (
		gone []*running
		errs []error
	)
	err := a.do(ctx, func() {
		for name, r := range a.running {
			d, there := c.Driver(name)
			if !there || !d.Enabled || a.config.Kubelet != c.Kubelet { // every path is another one
				gone = append(gone, r)
				errs = append(errs, a.leave(r))
			}
		}
		a.config = c
		a.store.configured(c, files)
	})
	if err != nil {
		return err
	}
	errs = append(errs, a.awaitLeft(gone))
	var missing []config.Driver
	err = a.do(ctx, func() {
		for _, d := range c.Drivers {
			if d.Enabled && !a.update(c, d) {
				missing = append(missing, d)
			}
		}
	})
	added := make([]*running, len(missing))
	var made sync.WaitGroup
	var mu sync.Mutex
	for i, d := range missing {
		made.Go(func() {
			socket, err := a.parts.Socket(ctx, c, d.Name)
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("cannot start the registrar of %s: %w", d.Name, err))
				return
			}
			added[i] = &running{kubelet: c.Kubelet, driver: d, socket: socket, ended: make(chan struct{})}
		})
	}
	made.Wait()
	errs = append(errs, err, a.startAll(ctx, added, func(r *running) (registrar.Settings, registrar.Driver) {
		a.running[r.driver.Name] = r
		return settings(r.driver), a.parts.Driver(c, r.driver)
	}))
	return errors.Join(errs...)
}

// WithdrawKept withdraws the registrations of drivers that are no longer configured, of which
// an earlier process left the registration socket.
func (a *Agent) WithdrawKept(ctx context.Context, names []string) error {
	a.applyM.Lock()
	defer a.applyM.Unlock()
	var (
		c     *config.Config
		added []*running
		errs  []error
	)
	if err := a.do(ctx, func() { c = a.config }); err != nil {
		return err
	}
	for _, name := range names {
		socket, err := a.parts.Socket(ctx, c, name)
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot withdraw %s: %w", name, err))
			continue
		}
		added = append(added, &running{kubelet: c.Kubelet, driver: config.Driver{Name: name}, socket: socket, ended: make(chan struct{})})
	}
	errs = append(errs, a.startAll(ctx, added, func(r *running) (registrar.Settings, registrar.Driver) {
		a.leaving[r] = struct{}{}
		return registrar.Settings{Name: r.driver.Name, Leaving: true}, nobody{}
	}))
	return errors.Join(append(errs, a.awaitLeft(added))...)
}

// nobody is the driver of a registration that is only to be withdrawn.
type nobody struct{}

func (nobody) Ask(context.Context, func(status.Report)) status.Report { return status.Report{} }
func (nobody) Hints() <-chan struct{}                                 { return nil }
func (nobody) Close() error                                           { return nil }

// startAll starts registrars as make says, which is called in the agent's goroutine. If that
// has ended their sockets are closed.
func (a *Agent) startAll(ctx context.Context, added []*running, how func(*running) (registrar.Settings, registrar.Driver)) error {
	added = slices.DeleteFunc(added, func(r *running) bool { return r == nil })
	err := a.do(context.WithoutCancel(ctx), func() {
		for _, r := range added {
			set, driver := how(r)
			a.start(r, set, driver)
		}
	})
	if err != nil {
		for _, r := range added {
			err = errors.Join(err, r.socket.Close(ctx))
		}
	}
	return err
}

func (a *Agent) start(r *running, set registrar.Settings, driver registrar.Driver) {
	log := a.log.With("driver", set.Name)
	a.store.own(set.Name, r)
	r.reg = registrar.New(set, driver, r.socket, registrar.Options{
		Log: log, Observe: func(s status.Driver) { a.store.driver(r, s) },
	})
	ctx := a.ctx
	a.ended.Go(func() {
		defer close(r.ended)
		r.reg.Run(ctx)
		if err := r.socket.Close(context.WithoutCancel(ctx)); err != nil {
			log.Error("cannot end a registration cleanly", "error", err)
		}
		select {
		case a.cmds <- func() { a.forget(r) }:
		case <-a.done:
		}
	})
}

// forget removes what has ended.
func (a *Agent) forget(r *running) {
	delete(a.leaving, r)
	if a.running[r.driver.Name] == r {
		delete(a.running, r.driver.Name)
	}
	a.store.forget(r, r.driver.Name)
}

// leave has a registration withdrawn.
func (a *Agent) leave(r *running) error {
	delete(a.running, r.driver.Name)
	a.leaving[r] = struct{}{}
	set := settings(r.driver)
	set.Leaving = true
	return r.reg.Update(a.ctx, set, nil)
}

// awaitLeft waits until they are withdrawn, for a while.
func (a *Agent) awaitLeft(all []*running) error {
	late := time.After(leaveTime)
	var errs []error
	for _, r := range all {
		select {
		case <-r.ended:
			continue
		default:
		}
		select {
		case <-r.ended:
		case <-late:
			late = time.After(0) // for the others, too
			d, _ := a.Status().Driver(r.driver.Name)
			errs = append(errs, fmt.Errorf("%s is not withdrawn yet, trying again: %s", r.driver.Name, d.Reason))
		}
	}
	return errors.Join(errs...)
}

// update hands a changed table to its registrar, if there is one; a driver that is found or
// trusted in another way gets a new client, the registration socket stays. One that could not
// be withdrawn yet goes on.
func (a *Agent) update(c *config.Config, d config.Driver) bool {
	r := a.running[d.Name]
	for l := range a.leaving {
		if r == nil && l.driver.Name == d.Name && l.kubelet == c.Kubelet {
			r = l
		}
	}
	if r == nil {
		return false
	}
	_, left := a.leaving[r]
	if !left && r.driver.Equal(d) {
		return true
	}
	var client registrar.Driver
	o := r.driver
	if left || o.Socket != d.Socket || o.Endpoint != d.Endpoint || o.SocketOwner != d.SocketOwner || o.Timeout != d.Timeout {
		client = a.parts.Driver(c, d)
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
	delete(a.leaving, r)
	a.running[d.Name] = r
	return true
}

func settings(d config.Driver) registrar.Settings {
	return registrar.Settings{
		Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, Versions: d.SupportedVersions,
		Withdraw: d.WhenGone == config.Withdraw, WithdrawAfter: d.WithdrawAfter,
	}
}

// Reregister makes the driver's registration socket again. ErrUnknown if there is no such
// driver.
func (a *Agent) Reregister(ctx context.Context, name string) error {
	var r *running
	if err := a.do(ctx, func() { r = a.running[name] }); err != nil {
		return err
	}
	if r == nil {
		return fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	return r.reg.Reregister(ctx)
}

// ErrUnknown is wrapped where a driver is asked for that does not run.
var ErrUnknown = errors.New("no enabled driver of that name is configured")

// Alive returns nil if the agent and every registrar really run, whatever their drivers do. It
// causes no look at anything.
func (a *Agent) Alive(ctx context.Context) error {
	var regs []*registrar.Registrar
	err := a.do(ctx, func() {
		for _, r := range a.running {
			regs = append(regs, r.reg)
		}
		for r := range a.leaving {
			regs = append(regs, r.reg)
		}
	})
	return errors.Join(err, allAlive(ctx, regs))
}

// allAlive asks registrars. One that has ended meanwhile was withdrawn: they end in no
// other way.
func allAlive(ctx context.Context, regs []*registrar.Registrar) error {
	var errs []error
	for _, r := range regs {
		if err := r.Alive(ctx); !errors.Is(err, registrar.ErrEnded) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
