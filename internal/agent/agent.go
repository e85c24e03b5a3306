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

// grace is how long a driver that vanished from the files keeps its registration: an
// editor, a package upgrade or a synchroniser may put the file back (spec §3).
const grace = 10 * time.Second

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
	leaving map[string]time.Time // drivers that vanished from the files: when to withdraw them
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
		leaving: map[string]time.Time{},
	}
}

// Run serves until ctx is done; then it ends all registrars, and closes their sockets
// (each of which knows whether its path stays).
func (a *Agent) Run(ctx context.Context) error {
	defer close(a.done)
	a.ctx, a.stop = context.WithCancel(context.WithoutCancel(ctx))
	defer a.stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if next := a.withdrawLeft(time.Now()); next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return a.closeAll()
		case cmd := <-a.cmds:
			cmd()
		case <-timer.C:
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

// Apply brings what runs in line with c, of the given files. Only what changed is touched.
// A driver that c does not name is withdrawn at once, or, with patience, when it has
// stayed away for 10 s. The error names drivers that could not be started; all others are.
func (a *Agent) Apply(ctx context.Context, c *config.Config, files []string, patience bool) error {
	var failed error
	err := a.do(ctx, func() {
		failed = a.apply(c, patience)
		a.board.configured(c, files)
	})
	return errors.Join(err, failed)
}

func (a *Agent) apply(c *config.Config, patience bool) error {
	if a.config.Kubelet != c.Kubelet {
		a.remove(a.names()...) // every path is another one
	}
	a.config = c
	var gone []string
	for _, name := range a.names() {
		d, there := c.Driver(name)
		switch {
		case there && d.Enabled:
			delete(a.leaving, name)
		case there || !patience:
			gone = append(gone, name)
		default:
			if _, already := a.leaving[name]; !already {
				a.leaving[name] = time.Now().Add(grace)
				a.log.Warn("driver vanished from the configuration", "driver", name, "withdrawn_in", grace)
			}
		}
	}
	a.remove(gone...)
	var errs []error
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
		socket, err := a.parts.Socket(a.config, d.Name)
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

// withdrawLeft withdraws the drivers whose grace is over, and tells when the next one's is.
func (a *Agent) withdrawLeft(now time.Time) (next time.Time) {
	var over []string
	for name, at := range a.leaving {
		switch {
		case !at.After(now):
			over = append(over, name)
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	a.remove(over...)
	return next
}

// remove ends registrars and takes their sockets away.
func (a *Agent) remove(names ...string) {
	a.end(names, func(ctx context.Context, name string, s Socket) error {
		a.log.Info("withdrawing: no longer configured, or disabled", "driver", name)
		if err := s.Withdraw(ctx); err != nil {
			return err
		}
		_, err := s.Close(ctx)
		return err
	})
	for _, name := range names {
		delete(a.leaving, name)
		a.board.forget(name)
	}
}

// closeAll ends everything with the process.
func (a *Agent) closeAll() error {
	return a.end(a.names(), func(ctx context.Context, name string, s Socket) error {
		_, err := s.Close(ctx)
		return err
	})
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
