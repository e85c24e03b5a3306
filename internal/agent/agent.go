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
)

// again is how often a registration socket that could not be taken away is tried.
const again = 2 * time.Second

// Socket is a registration socket, and how it ends.
type Socket interface {
	registrar.Socket
	// Close ends the listener with the process; whether the path stays is the
	// socket's own rule (descriptor store, --keep-sockets).
	Close(ctx context.Context) (kept bool, err error)
}

// Parts makes what a registrar needs, for a configuration that is about to be in force.
type Parts interface {
	Driver(c *config.Config, d config.Driver) registrar.Driver
	Socket(c *config.Config, name string) (Socket, error)
}

// Agent is made with New; Run must run for anything else to answer.
type Agent struct {
	log   *slog.Logger
	parts Parts
	board *board
	cmds  chan func()
	done  chan struct{}

	// All below belongs to the goroutine that is in Run.
	ctx     context.Context // of the registrars
	stop    context.CancelFunc
	config  *config.Config
	running map[string]*running
	left    []leftover
}

// running is one registrar and what belongs to it.
type running struct {
	driver config.Driver
	reg    *registrar.Registrar
	socket Socket
	cancel context.CancelFunc
	ended  sync.WaitGroup
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
		board:   newBoard(o.Version, time.Now()),
		cmds:    make(chan func()),
		done:    make(chan struct{}),
		config:  config.Default(),
		running: map[string]*running{},
	}
}

// Run serves until ctx is done; then it ends all registrars, and closes their sockets
// (each of which knows whether its path stays).
func (a *Agent) Run(ctx context.Context) error {
	defer close(a.done)
	a.ctx, a.stop = context.WithCancel(context.WithoutCancel(ctx))
	defer a.stop()
	timer := time.NewTimer(again)
	defer timer.Stop()
	for {
		if len(a.left) == 0 {
			timer.Stop()
		} else {
			timer.Reset(again)
		}
		select {
		case <-ctx.Done():
			return a.closeAll()
		case cmd := <-a.cmds:
			cmd()
		case <-timer.C:
			a.withdrawLeft()
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
// started or withdrawn; all others are.
func (a *Agent) Apply(ctx context.Context, c *config.Config, files []string) error {
	var failed error
	err := a.do(ctx, func() {
		failed = a.apply(c)
		a.board.configured(c, files)
	})
	return errors.Join(err, failed)
}

func (a *Agent) apply(c *config.Config) error {
	var gone []string
	for _, name := range a.names() {
		d, there := c.Driver(name)
		if !there || !d.Enabled || a.config.Kubelet != c.Kubelet { // every path is another one
			gone = append(gone, name)
		}
	}
	errs := []error{a.remove(gone...)}
	a.config = c
	var added []*running
	for _, d := range c.Drivers {
		if !d.Enabled {
			continue
		}
		if r, runs := a.running[d.Name]; runs {
			errs = append(errs, a.update(r, d))
			continue
		}
		// All sockets first: one that is not adopted yet does not answer when another
		// registrar, which is about to publish, asks it for its name.
		socket, err := a.socket(d.Name)
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot start the registrar of %s: %w", d.Name, err))
			continue
		}
		added = append(added, &running{driver: d, socket: socket})
	}
	for _, r := range added {
		a.start(r)
	}
	return errors.Join(errs...)
}

func (a *Agent) start(r *running) {
	var ctx context.Context
	ctx, r.cancel = context.WithCancel(a.ctx)
	r.reg = registrar.New(settings(r.driver), a.parts.Driver(a.config, r.driver), r.socket, registrar.Options{
		Log:     a.log.With("driver", r.driver.Name),
		Observe: a.board.driver,
	})
	r.ended.Go(func() { r.reg.Run(ctx) })
	a.running[r.driver.Name] = r
}

// update hands a changed table to its registrar; a driver that is found or trusted in
// another way gets a new client, the registration socket stays.
func (a *Agent) update(r *running, d config.Driver) error {
	if r.driver.Equal(d) {
		return nil
	}
	var client registrar.Driver
	o := r.driver
	if o.Socket != d.Socket || o.Endpoint != d.Endpoint || o.SocketOwner != d.SocketOwner || o.Timeout != d.Timeout {
		client = a.parts.Driver(a.config, d)
	}
	r.driver = d
	return r.reg.Update(a.ctx, settings(d), client)
}

func settings(d config.Driver) registrar.Settings {
	return registrar.Settings{
		Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, Versions: d.SupportedVersions,
		Withdraw: d.WhenGone == config.Withdraw, WithdrawAfter: d.WithdrawAfter,
	}
}

// remove ends registrars and takes their sockets away.
func (a *Agent) remove(names ...string) error {
	var mu sync.Mutex
	err := a.end(names, func(ctx context.Context, name string, s Socket) error {
		a.log.Info("withdrawing: no longer configured, or disabled", "driver", name)
		if err := s.Withdraw(ctx); err != nil {
			mu.Lock()
			defer mu.Unlock()
			a.left = append(a.left, leftover{name, a.config.Kubelet, s})
			return fmt.Errorf("its registration socket is still there; trying again: %w", err)
		}
		_, err := s.Close(ctx)
		return err
	})
	for _, name := range names {
		a.board.forget(name)
	}
	return err
}

// closeAll ends everything with the process.
func (a *Agent) closeAll() error {
	errs := []error{a.end(a.names(), func(ctx context.Context, name string, s Socket) error {
		_, err := s.Close(ctx)
		return err
	})}
	for _, l := range a.left {
		_, err := l.socket.Close(a.ctx)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// end ends the named registrars side by side and then does the last thing to each socket.
func (a *Agent) end(names []string, last func(context.Context, string, Socket) error) error {
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		r := a.running[name]
		delete(a.running, name)
		wg.Go(func() {
			r.cancel()
			r.ended.Wait()
			if err := last(a.ctx, name, r.socket); err != nil {
				a.log.Error("cannot end a registration cleanly", "driver", name, "error", err)
				errs[i] = fmt.Errorf("%s: %w", name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (a *Agent) names() []string {
	names := make([]string, 0, len(a.running))
	for name := range a.running {
		names = append(names, name)
	}
	return names
}

// Reregister makes the driver's registration socket anew. ErrUnknown if there is no
// such driver.
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

// Alive returns nil if the agent and every registrar really run; what the drivers do is
// of no account.
func (a *Agent) Alive(ctx context.Context) error {
	var regs []*registrar.Registrar
	err := a.do(ctx, func() {
		for _, r := range a.running {
			regs = append(regs, r.reg)
		}
	})
	return errors.Join(err, allAlive(ctx, regs))
}

// allAlive asks registrars. One that has ended meanwhile is no longer wanted: they end in no
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
