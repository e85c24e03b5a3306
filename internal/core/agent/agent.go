// Package agent decides which registrars run: it compares the configuration in force with the
// running registrars, starts, changes and ends them, and has the status of all of them.
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

	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

const (
	// leaveTime is how long Apply waits for withdrawals. They take milliseconds; slower ones
	// continue in the background.
	leaveTime = 2 * time.Second

	// A registrar that could not be started is tried again after startFirst, and then after
	// twice the time, up to startMost.
	startFirst = time.Second
	startMost  = 30 * time.Second
)

// Socket is a registration socket (implemented by regsocket.Socket).
type Socket interface {
	registrar.Socket
	// Close closes the listener at the end of its registrar. Whether the path stays is up to
	// the socket (descriptor store, --keep-sockets), but for a registration that was withdrawn,
	// of which nothing is kept. It may block for a limited time. After it, whatever the error,
	// Parts.Socket succeeds for the same driver.
	Close(ctx context.Context, withdrawn bool) error
}

// Parts creates what a registrar needs.
type Parts interface {
	Driver(d config.Driver) registrar.Driver
	// Socket may block for a limited time. It is called for several drivers at once.
	Socket(ctx context.Context, name string) (Socket, error)
}

// Agent runs the registrars. Create it with New, and call Run once.
type Agent struct {
	log     *slog.Logger
	parts   Parts
	version string
	began   time.Time
	ctx     context.Context // of the registrars
	stop    context.CancelFunc
	ended   sync.WaitGroup // of the registrars
	hints   chan struct{}  // capacity one: reconcile may find something to do

	// apply is a lock, held while registrars are started, changed and withdrawn. That can take
	// seconds. It is not a Mutex, because virtual time (testing/synctest) does not advance while a
	// goroutine waits for one.
	apply chan struct{}
	left  bool // by Leave; under apply

	mu          sync.Mutex // guards the fields below; never held across a call to others
	config      *config.Config
	files       []string // of config
	configError string
	invalid     map[string]string   // the errors of drivers' tables in the files
	invalidFile []string            // files of which nothing is in force
	running     map[string]*running // by driver
	failed      map[string]error    // why an enabled driver has no registrar
	unnamed     status.Driver       // without a State: there is none
	kubelet     status.Kubelet
	changed     chan struct{} // closed at the next change
}

// New returns an agent without any driver.
func New(log *slog.Logger, parts Parts, version string) *Agent {
	ctx, stop := context.WithCancel(context.Background())
	return &Agent{
		log: log, parts: parts, version: version, began: time.Now(), ctx: ctx, stop: stop,
		hints: make(chan struct{}, 1), apply: make(chan struct{}, 1),
		config: config.Default(), running: map[string]*running{}, changed: make(chan struct{}),
	}
}

// Run starts registrars that could not be started by Apply, until ctx is done. Then it ends all
// registrars and closes their sockets.
func (a *Agent) Run(ctx context.Context) error {
	var pause time.Duration
	var again time.Time // zero: at the next hint
	last := ""
	for {
		select {
		case <-a.hints:
		case <-rate.At(again):
		case <-ctx.Done():
			a.apply <- struct{}{} // a running Apply may still start registrars
			a.stop()
			<-a.apply
			a.ended.Wait()
			return nil
		}
		a.apply <- struct{}{}
		err := a.reconcile(ctx, 0)
		<-a.apply
		if err == nil {
			pause, again, last = 0, time.Time{}, ""
			continue
		}
		if err.Error() != last {
			last = err.Error()
			a.log.Warn("not all registrars have started, trying again", "error", err)
		}
		pause = min(max(startFirst, 2*pause), startMost)
		again = time.Now().Add(pause)
	}
}

func (a *Agent) registrars() map[string]*running {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.running)
}

// Apply makes the running registrars match c, which was read from the given files and has the
// root_dir of all before it. Drivers that did not change are not touched; a driver that c does not
// name is withdrawn. The error names the drivers that could not be started or withdrawn yet. Both
// are retried in the background.
func (a *Agent) Apply(ctx context.Context, c *config.Config, files []string) error {
	a.apply <- struct{}{}
	defer func() { <-a.apply }()
	a.change(func() { a.config, a.files = c, slices.Clone(files) })
	return errors.Join(a.awaitWithdrawal(ctx, a.withdrawAllBut(c)), a.reconcile(ctx, leaveTime))
}

// Leave withdraws all drivers, and starts none any more. The status has the drivers of c, which
// another process registers, with why as their reason: that they are gone must not look like
// a configuration without drivers.
func (a *Agent) Leave(ctx context.Context, c *config.Config, why error) error {
	a.apply <- struct{}{}
	defer func() { <-a.apply }()
	a.left = true
	failed := map[string]error{}
	for _, d := range c.Drivers {
		if d.Enabled {
			failed[d.Name] = why
		}
	}
	a.change(func() { a.config, a.failed = c, failed })
	return a.awaitWithdrawal(ctx, a.withdrawAllBut(&config.Config{}))
}

// withdrawAllBut withdraws the drivers that are not enabled in c.
func (a *Agent) withdrawAllBut(c *config.Config) (leaving []*running) {
	for name, r := range a.registrars() {
		if d, _ := c.Driver(name); r.driver.Enabled && !d.Enabled {
			leaving = append(leaving, r)
			d = r.driver
			d.Enabled = false
			a.update(r, d)
		}
	}
	return leaving
}

// reconcile starts a registrar for each enabled driver that has none, and passes changed tables to
// those that run. It waits for registrars that are ending. If that takes longer than wait, Run
// reconciles again.
func (a *Agent) reconcile(ctx context.Context, wait time.Duration) error {
	if a.left {
		return nil
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	c, all := a.config, a.registrars() // config changes under apply
	var missing []config.Driver
	for _, d := range c.Drivers {
		if r := all[d.Name]; d.Enabled && (r == nil || !a.update(r, d)) {
			missing = append(missing, d)
		}
	}
	sockets, errs := make([]Socket, len(missing)), make([]error, len(missing))
	var opened sync.WaitGroup
	for i, d := range missing {
		opened.Go(func() {
			if r := all[d.Name]; r != nil && !r.awaitEnd(waiting) {
				errs[i] = errors.New("its registration socket is still being closed")
				return
			}
			sockets[i], errs[i] = a.parts.Socket(ctx, d.Name)
		})
	}
	opened.Wait()
	failed := map[string]error{}
	for i, d := range missing {
		if errs[i] == nil && a.ctx.Err() != nil {
			errs[i] = errors.Join(errors.New("the agent has ended"), sockets[i].Close(ctx, false))
		}
		if errs[i] == nil {
			a.start(d, sockets[i])
			continue
		}
		failed[d.Name] = errs[i]
		errs[i] = fmt.Errorf("cannot start the registrar of %s: %w", d.Name, errs[i])
	}
	a.change(func() { a.failed = failed })
	err := errors.Join(errs...)
	if err != nil && wait > 0 {
		rate.Hint(a.hints)
	}
	return err
}

// Alive returns nil if every registrar responds, whatever its driver does. It asks all at once: on
// a starved machine the slow ones would add up.
func (a *Agent) Alive(ctx context.Context) error {
	all := a.registrars()
	errs := make(chan error, len(all))
	for _, r := range all {
		go func() { errs <- r.reg.Alive(ctx) }()
	}
	var err error
	for range all {
		err = errors.Join(err, <-errs)
	}
	return err
}

// Reregister recreates the driver's registration socket.
func (a *Agent) Reregister(ctx context.Context, name string, force bool) error {
	a.mu.Lock()
	d, _ := a.config.Driver(name)
	r := a.running[name]
	a.mu.Unlock()
	if !d.Enabled || r == nil {
		return fmt.Errorf("no enabled driver of that name is configured: %q", name)
	}
	return r.reg.Reregister(ctx, force)
}

// Configured returns the table of a driver in the configuration in force.
func (a *Agent) Configured(name string) (config.Driver, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.config.Driver(name)
}
