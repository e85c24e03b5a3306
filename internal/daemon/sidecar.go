package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"time"

	"csi-registrar/internal/agent"
	"csi-registrar/internal/compat"
	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/driver"
	"csi-registrar/internal/status"
	"csi-registrar/internal/worker"
)

// RunSidecar is the daemon with the flags of node-driver-registrar: one driver, which tells its
// own name, and no files.
func RunSidecar(ctx context.Context, o Options, flags compat.Options) error {
	c := config.Default()
	c.Log.Format = cmp.Or(flags.LogFormat, c.Log.Format)
	log, level := newLogger(o.Stderr, c.Log)
	level.Set(flags.LogLevel())
	for _, w := range flags.Warnings {
		log.Warn(w)
	}
	o.HTTP = "" // flags.HTTPAddr is served as the peer does
	d := newDaemon(o, log, worker.NewPool(), flags.RegistryDir)
	s := &sidecar{daemon: d, flags: flags}
	return d.run(ctx, sidecarBackend{d.backend(s.reload), flags.RegistryDir}, func(ctx context.Context) error {
		if err := s.serveHealth(ctx); err != nil {
			return err
		}
		d.onHangup(ctx, func() { log.Info("nothing to reload: the flags are the configuration") })
		d.work.Go(func() { s.follow(ctx) })
		return nil
	})
}

// sidecarBackend is a backend whose directory was named by a flag: the agent's configuration
// does not have it.
type sidecarBackend struct {
	backend
	registry string
}

// Status implements control.Backend.
func (b sidecarBackend) Status() status.Document {
	s := b.backend.Status()
	s.PluginsRegistry = b.registry
	return s
}

// sidecar learns the driver's name and keeps the agent's configuration in step with it.
type sidecar struct {
	*daemon
	flags compat.Options
}

func (s *sidecar) reload(context.Context) error {
	return errors.New("there is nothing to reload: this daemon was started with node-driver-registrar's flags")
}

// follow has the driver registered under the name that it gives itself, also when it comes
// back with another.
func (s *sidecar) follow(ctx context.Context) {
	for {
		name, ok := s.discover(ctx)
		if !ok {
			return
		}
		s.note("starting the registrar", s.apply(ctx, s.flags.Driver(name)))
		s.agent.Unnamed(nil)
		if !s.renamed(ctx, name) {
			return
		}
		s.log.Warn("the driver is not the one that it was; asking for its name again", "was", name)
		s.note("withdrawing", s.apply(ctx))
	}
}

func (s *sidecar) apply(ctx context.Context, drivers ...config.Driver) error {
	c := config.Default()
	c.Drivers = drivers
	return s.agent.Apply(ctx, c, nil)
}

// discover asks the driver until it has told a name that may be registered; false when
// ctx is done. It waits as the registrar does: hints first, a backoff as the net.
func (s *sidecar) discover(ctx context.Context) (string, bool) {
	d := s.flags.Driver("")
	hints := s.watcher.Subscribe(d.Socket)
	client := driver.New(driver.Config{Socket: d.Socket, Timeout: d.Timeout, Owner: d.SocketOwner},
		driver.Options{Log: s.log, Hints: hints, Pool: s.pool})
	defer func() { s.note("closing the connection to the driver", client.Close()) }()
	shown := status.Driver{Socket: d.Socket, Endpoint: d.Endpoint, Registration: status.None, Since: time.Now()}
	show := func(rep status.Report) {
		state := string(rep.Driver)
		if shown.State == state && shown.Reason == rep.Reason {
			return
		}
		level := slog.LevelDebug
		if shown.State != state {
			level, shown.Since = slog.LevelInfo, time.Now()
		}
		shown.State, shown.Driver, shown.Reason = state, rep.Driver, rep.Reason
		s.agent.Unnamed(&shown)
		s.log.Log(ctx, level, "waiting for the driver", "socket", d.Socket, "state", state, "reason", rep.Reason)
	}
	for wait := time.Second; ; {
		begun := time.Now()
		rep := client.Ask(ctx, show)
		if ctx.Err() != nil {
			return "", false
		}
		if rep.Driver == status.Ready {
			return rep.Identity.Name, true
		}
		show(rep)
		wait = min(2*wait, 30*time.Second)
		if rep.Driver == status.Starting {
			wait = time.Second
		}
		select {
		case <-ctx.Done():
			return "", false
		case <-client.Hints():
			// The first is asked at once; a socket that flaps costs no more than a question in 10 ms.
			select {
			case <-ctx.Done():
				return "", false
			case <-time.After(time.Until(begun.Add(10 * time.Millisecond))):
			}
		case <-time.After(wait - wait/8 + rand.N(wait/4)):
		}
	}
}

// renamed waits until the driver answers with another name; false when ctx is done.
func (s *sidecar) renamed(ctx context.Context, name string) bool {
	for {
		changed := s.agent.Changed()
		if d, _ := s.agent.Status().Driver(name); d.Driver == status.Mismatch {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// serveHealth serves /healthz where node-driver-registrar would.
func (s *sidecar) serveHealth(ctx context.Context) error {
	if s.flags.HTTPAddr == "" {
		return nil
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.flags.HTTPAddr)
	if err != nil {
		return fmt.Errorf("cannot serve /healthz: %w", err)
	}
	var profiles http.Handler
	if s.flags.PProf {
		profiles = control.Profiles()
	}
	srv := &http.Server{Handler: compat.Handler(s.healthy, profiles), ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 30 * time.Second}
	s.work.Go(func() {
		defer context.AfterFunc(ctx, func() { s.note("ending /healthz", srv.Close()) })()
		if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			s.note("serving /healthz", err)
		}
	})
	return nil
}

// healthy reports whether the registration socket is in place: fs.ErrNotExist if there is none.
func (s *sidecar) healthy() error {
	drivers := s.agent.Status().Drivers
	if len(drivers) == 0 {
		return fs.ErrNotExist
	}
	switch d := drivers[0]; d.Registration {
	case status.Published, status.Registered, status.Refused:
		return nil
	case status.Conflict:
		return errors.New(d.Reason)
	default:
		return fmt.Errorf("no registration socket: the driver is %s: %s: %w", d.State, d.Reason, fs.ErrNotExist)
	}
}

var _ agent.Parts = (*parts)(nil)
