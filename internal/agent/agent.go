// Package agent decides which registrars run: it holds the configuration in force against
// what runs, starts, changes and ends registrars, and keeps the snapshot of them all.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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
	// Record sends the calls to the driver to a recorder until ctx is done, and then to the
	// driver again. listen is called with the path where the recorder is to listen, linked
	// when the calls arrive there.
	Record(ctx context.Context, listen func(ctx context.Context, path string) error, linked func()) error
}

// Parts makes what a registrar needs, for a configuration that is about to be in force.
type Parts interface {
	Driver(d config.Driver) registrar.Driver
	// Socket may wait, for a limited time; it is called for several drivers at once.
	Socket(ctx context.Context, c *config.Config, name string) (Socket, error)
}

// Agent is made with New; Run must be called once.
type Agent struct {
	log     *slog.Logger
	parts   Parts
	version string
	began   time.Time
	applyM  sync.Mutex      // one Apply at a time
	ctx     context.Context // of the registrars
	stop    context.CancelFunc
	ended   sync.WaitGroup // of the registrars

	mu          sync.Mutex // of all below; never held across a call to others
	config      *config.Config
	files       []string // of config
	configError string
	running     map[key]*running
	unnamed     *status.Driver
	changed     chan struct{} // closed at the next change
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
	driver config.Driver // not enabled: its registration is being withdrawn. Apply's alone
	reg    *registrar.Registrar
	socket Socket
	ended  chan struct{} // closed when all of it has ended
	status status.Driver // under Agent.mu
}

// Options are the Agent's surroundings.
type Options struct {
	Log     *slog.Logger
	Parts   Parts
	Version string
}

// New makes an agent without any driver.
func New(o Options) *Agent {
	ctx, stop := context.WithCancel(context.Background())
	return &Agent{
		log: o.Log, parts: o.Parts, version: o.Version, began: time.Now(), ctx: ctx, stop: stop,
		config: config.Default(), running: map[key]*running{}, changed: make(chan struct{}),
	}
}

// Run waits until ctx is done; then it ends all registrars, which close their sockets
// (each of which knows whether its path stays).
func (a *Agent) Run(ctx context.Context) error {
	<-ctx.Done()
	a.applyM.Lock() // what an Apply starts meanwhile is waited for, too
	a.stop()
	a.applyM.Unlock()
	a.ended.Wait()
	return nil
}

// registrars are those that run at this moment.
func (a *Agent) registrars() map[key]*running {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.running)
}

// Apply brings what runs in line with c, of the given files. Only what changed is touched;
// a driver that c does not name is withdrawn. The error names drivers that could not be
// started, or not be withdrawn yet; all others are.
func (a *Agent) Apply(ctx context.Context, c *config.Config, files []string) error {
	a.applyM.Lock()
	defer a.applyM.Unlock()
	var left []*running
	all := a.registrars()
	for k, r := range all {
		d, there := c.Driver(k.name)
		if r.driver.Enabled && !(there && d.Enabled && k.kubelet == c.Kubelet) { // another root_dir: every path is another
			left = append(left, r)
			d = r.driver
			d.Enabled = false
			a.update(r, d)
		}
	}
	a.change(func() { a.config, a.files = c, slices.Clone(files) })
	late := a.awaitLeft(ctx, left)
	var missing []config.Driver
	for _, d := range c.Drivers {
		if r := all[key{d.Name, c.Kubelet}]; d.Enabled && (r == nil || !a.update(r, d)) {
			missing = append(missing, d)
		}
	}
	_, failed := a.startAll(ctx, c, missing)
	return errors.Join(late, failed)
}

// WithdrawKept withdraws the registrations of drivers that are not enabled, of which
// an earlier process left the registration socket.
func (a *Agent) WithdrawKept(ctx context.Context, names []string) error {
	a.applyM.Lock()
	defer a.applyM.Unlock()
	kept := make([]config.Driver, len(names))
	for i, name := range names {
		kept[i].Name = name
	}
	left, err := a.startAll(ctx, a.config, kept)
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
		made.Go(func() { sockets[i], errs[i] = a.parts.Socket(ctx, c, d.Name) })
	}
	made.Wait()
	for i, d := range drivers {
		if errs[i] == nil && a.ctx.Err() != nil {
			errs[i] = errors.Join(errors.New("the agent has ended"), sockets[i].Close(ctx))
		}
		if errs[i] != nil {
			errs[i] = fmt.Errorf("cannot start the registrar of %s: %w", d.Name, errs[i])
			continue
		}
		started = append(started, a.start(key{d.Name, c.Kubelet}, d, sockets[i]))
	}
	return started, errors.Join(errs...)
}

func (a *Agent) start(k key, d config.Driver, socket Socket) *running {
	r := &running{key: k, driver: d, socket: socket, ended: make(chan struct{})}
	var driver registrar.Driver = nobody{}
	if d.Enabled {
		driver = a.parts.Driver(d)
	}
	log := a.log.With("driver", d.Name)
	r.reg = registrar.New(settings(k.kubelet, d), driver, socket, registrar.Options{
		Log: log, Observe: func(s status.Driver) { a.change(func() { r.status = s }) },
	})
	a.change(func() { a.running[k] = r })
	a.ended.Go(func() {
		defer close(r.ended)
		r.reg.Run(a.ctx)
		if err := socket.Close(context.WithoutCancel(a.ctx)); err != nil {
			log.Error("cannot end a registration cleanly", "error", err)
		}
		a.change(func() {
			if a.running[k] == r { // else another took its place
				delete(a.running, k)
			}
		})
	})
	return r
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

// update hands a changed table to its registrar, false if that has ended; a driver that is found
// or trusted in another way gets a new client, the registration socket stays. One that could not
// be withdrawn yet goes on.
func (a *Agent) update(r *running, d config.Driver) bool {
	if r.driver.Equal(d) {
		return true
	}
	var client registrar.Driver
	if o := r.driver; o.Socket != d.Socket || o.Endpoint != d.Endpoint || o.SocketOwner != d.SocketOwner || o.Timeout != d.Timeout {
		client = a.parts.Driver(d)
	}
	if err := r.reg.Update(a.ctx, settings(r.kubelet, d), client); err != nil {
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

func settings(k config.Kubelet, d config.Driver) registrar.Settings {
	endpoint, target := k.Announced(d)
	return registrar.Settings{
		Name: d.Name, Socket: d.Socket, Endpoint: endpoint, LinkTarget: target, Versions: d.SupportedVersions, Leaving: !d.Enabled,
		Withdraw: d.WhenGone == config.Withdraw, WithdrawAfter: d.WithdrawAfter,
	}
}

// Reregister makes the driver's registration socket again. ErrUnknown if there is no such
// driver.
func (a *Agent) Reregister(ctx context.Context, name string) error {
	r, err := a.enabled(name)
	if err != nil {
		return err
	}
	return r.reg.Reregister(ctx)
}

// Record sends the calls to the driver to a recorder, as Socket.Record does.
func (a *Agent) Record(ctx context.Context, name string, listen func(context.Context, string) error, linked func()) error {
	r, err := a.enabled(name)
	if err != nil {
		return err
	}
	return r.socket.Record(ctx, listen, linked)
}

// enabled returns what runs of a driver.
func (a *Agent) enabled(name string) (*running, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	d, _ := a.config.Driver(name)
	r := a.running[key{name, a.config.Kubelet}]
	if !d.Enabled || r == nil {
		return nil, fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	return r, nil
}

// ErrUnknown is wrapped where a driver is asked for that does not run.
var ErrUnknown = errors.New("no enabled driver of that name is configured")

// Alive returns nil if every registrar really runs, whatever its driver does. It causes no look at
// anything. All are asked at once: on a starved machine the slow ones would add up.
func (a *Agent) Alive(ctx context.Context) error { return allAlive(ctx, a.registrars()) }

// allAlive asks registrars. One that has ended meanwhile was withdrawn: they end in no
// other way.
func allAlive(ctx context.Context, all map[key]*running) error {
	errs := make(chan error, len(all))
	for _, r := range all {
		go func() {
			err := r.reg.Alive(ctx)
			if errors.Is(err, registrar.ErrEnded) {
				err = nil
			}
			errs <- err
		}()
	}
	var err error
	for range all {
		err = errors.Join(err, <-errs)
	}
	return err
}
