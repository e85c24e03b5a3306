package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"time"

	"csi-registrar/internal/tool/importer"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/worker"
)

// RunSidecar runs the daemon with the flags of node-driver-registrar: one driver, which reports its
// own name, and no files.
func RunSidecar(ctx context.Context, o Options, flags compat.Options) error {
	c := config.Default()
	c.Log.Format = cmp.Or(flags.LogFormat, c.Log.Format)
	log, level := newLogger(o.Stderr, c.Log)
	level.Set(flags.LogLevel())
	for _, w := range flags.Warnings {
		log.Warn(w)
	}
	o.HTTP = "" // flags.HTTPAddr is served as node-driver-registrar does
	d := newDaemon(o, log, worker.NewPool(), flags.RegistryDir)
	s := &sidecar{daemon: d, flags: flags}
	return d.run(ctx, backend{d.agent, d, s.reload}, func(ctx context.Context) error {
		if err := s.serveHealth(ctx); err != nil {
			return err
		}
		d.onHangup(ctx, func() { log.Info("nothing to reload: the flags are the configuration") })
		d.work.Go(func() { s.follow(ctx) })
		return nil
	})
}

// sidecar finds out the driver's name and updates the agent's configuration with it.
type sidecar struct {
	*daemon
	flags compat.Options
}

func (s *sidecar) reload(context.Context) error {
	return errors.New("there is nothing to reload: this daemon was started with node-driver-registrar's flags")
}

// follow registers the driver under the name that it reports, also if it returns with another one.
func (s *sidecar) follow(ctx context.Context) {
	for {
		name, ok := s.discover(ctx)
		if !ok {
			return
		}
		s.note("starting the registrar", s.apply(ctx, s.flags.Driver(name)))
		s.agent.Unnamed(status.Driver{})
		if !s.renamed(ctx, name) {
			return
		}
		s.log.Warn("the driver reports another name; asking for its name again", "was", name)
		s.note("withdrawing", s.apply(ctx))
	}
}

func (s *sidecar) apply(ctx context.Context, drivers ...config.Driver) error {
	c := config.Default()
	c.Drivers = drivers
	return s.agent.Apply(ctx, c, nil)
}

// discover queries the driver until it reports a name that can be registered; false when ctx is
// done. Like the registrar, it waits for hints, with a backoff as a fallback.
func (s *sidecar) discover(ctx context.Context) (string, bool) {
	d := s.flags.Driver("")
	client := driver.New(d.Connection,
		driver.Options{Log: s.log, Hints: s.watcher.Subscribe(d.Socket), Pool: s.pool, AnyEndpoint: true})
	defer client.Close()
	shown := status.Driver{Socket: d.Socket, Endpoint: d.Endpoint, Registration: status.None}
	show := func(rep status.Report) {
		if state := string(rep.Driver); shown.State != state {
			shown.State, shown.Since = state, time.Now().UTC()
			s.log.Info("waiting for the driver", "socket", d.Socket, "state", state, "reason", rep.Reason)
		}
		shown.Driver, shown.Reason = rep.Driver, rep.Reason
		s.agent.Unnamed(shown)
	}
	var backoff registrar.Backoff
	for {
		rep := client.Ask(ctx, show)
		switch {
		case ctx.Err() != nil:
			return "", false
		case rep.Driver == status.Ready:
			return rep.Identity.Name, true
		}
		show(rep)
		select {
		case <-ctx.Done():
			return "", false
		case <-client.Hints():
		case <-time.After(backoff.Next(rep, time.Now())):
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

// serveHealth serves /healthz at the address that node-driver-registrar would use.
func (s *sidecar) serveHealth(ctx context.Context) error {
	var profiles http.Handler
	if s.flags.PProf {
		profiles = control.Profiles()
	}
	return s.serveTCP(ctx, s.flags.HTTPAddr, compat.Handler(s.healthy, profiles))
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
