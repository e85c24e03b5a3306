package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"sync"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/core/sidecar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// RunSidecar runs the daemon with the flags of node-driver-registrar: one driver, which reports its
// own name, and no files.
func RunSidecar(ctx context.Context, o Options, flags sidecar.Options) error {
	c := config.Default()
	c.Log.Format = cmp.Or(flags.LogFormat, c.Log.Format)
	log := newLogger(o.Stderr, c.Log)
	defer log.queue.Close()
	log.level.Set(flags.Level)
	for _, w := range flags.Warnings {
		log.Warn(w)
	}
	o.HTTP = "" // flags.HTTPAddr is served as node-driver-registrar does
	d := newDaemon(o, log, worker.NewPool(), flags.RegistryDir)
	defer d.notifier.Close()
	s := &sidecarRun{daemon: d, flags: flags}
	return d.run(ctx, backend{d.agent, d, s.reload}, func(ctx context.Context) error {
		// Asked as early as possible: the rest of the start runs meanwhile.
		named := d.parts.Driver(flags.Driver(""))
		d.parts.named = named
		named.Follow(true, false, 0)
		var profiles http.Handler
		if flags.PProf {
			profiles = control.Profiles()
		}
		health := sidecar.Handler(s.healthy, profiles)
		if err := errors.Join(d.parts.open(c.Kubelet.RootDir), s.serveTCP(ctx, flags.HTTPAddr, health)); err != nil {
			return err
		}
		d.onHangup(ctx, func() { log.Info("nothing to reload: the flags are the configuration") })
		d.work.Go(func() { s.follow(ctx, named) })
		return nil
	})
}

// sidecarRun finds out the driver's name and updates the agent's configuration with it.
type sidecarRun struct {
	*daemon
	flags sidecar.Options
}

func (s *sidecarRun) reload(context.Context, bool) ([]string, error) {
	return nil, errors.New("there is nothing to reload: this daemon was started with node-driver-registrar's flags")
}

// follow registers the driver under the name that it reports first. If it returns with another one
// (driver.New), that is a mismatch, and the liveness probe of the pod fails.
func (s *sidecarRun) follow(ctx context.Context, named registrar.Driver) {
	d := s.flags.Driver("")
	shown := status.Driver{Socket: safetext.Claim(d.Socket), Endpoint: safetext.Claim(d.Endpoint), Registration: status.None}
	// The first answer and the publication, or a second without an answer, come before the watches:
	// in a directory with many files they occupy a processor for milliseconds.
	watch := sync.OnceFunc(func() { close(s.watch) })
	for {
		select {
		case <-ctx.Done():
			return
		case <-named.Hints():
		}
		view := named.Look()
		if view.Driver == status.Ready {
			time.AfterFunc(100*time.Millisecond, watch)
			c := config.Default()
			c.Drivers = []config.Driver{s.flags.Driver(view.Identity.Name)}
			s.note("start the registrar", s.agent.Apply(ctx, c, nil))
			s.agent.Unnamed(status.Driver{})
			return
		}
		watch()
		if state := string(view.Driver); shown.State != state {
			shown.State, shown.Since = state, time.Now()
			s.log.Info("waiting for the driver", "socket", d.Socket, "state", state, "reason", view.Reason)
		}
		shown.Driver, shown.Reason = view.Driver, view.Reason
		s.agent.Unnamed(shown)
	}
}

// healthy reports whether the registration socket is in place, or that of the host's csi-registrar:
// fs.ErrNotExist if there is none.
func (s *sidecarRun) healthy() error {
	drivers := s.agent.Status().Drivers
	if len(drivers) == 0 {
		return fs.ErrNotExist
	}
	return health(drivers[0])
}

func health(d status.Driver) error {
	switch d.Registration {
	case status.Published, status.Registered, status.Refused:
		return nil
	case status.Conflict:
		if d.Yields { // the liveness probe must not restart it for ever
			return nil
		}
		return errors.New(d.Reason)
	default:
		return fmt.Errorf("no registration socket: the driver is %s: %s: %w", d.State, d.Reason, fs.ErrNotExist)
	}
}
