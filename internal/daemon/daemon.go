// Package daemon is the daemon's process: it connects the parts, and is responsible for the order
// in which they start and stop, for reloading the configuration, and for the watchdog.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// daemon is the process.
type daemon struct {
	options  Options
	log      *slog.Logger
	pool     *worker.Pool // of calls that may never return
	watcher  *fswatch.Watcher
	agent    *agent.Agent
	parts    *parts
	watch    chan struct{} // closed when the watcher may begin
	notifier *systemd.Notifier
	handed   *descriptors
	ready    chan struct{} // closed after READY=1
	live     *liveness     // set before anything is served
	volumes  nodeVolumes
	landlock int // its ABI; 0: it is not in force. Set by begin
	// the plugins_registry that existed when Landlock was put in force; zero: none. Set by begin
	writable unixsock.FileID

	journalRefused <-chan struct{} // a hint: nobody listens at journald's socket

	// Everything that runs beside the agent. It ends before the agent, so that no call finds only a
	// part of the daemon.
	work sync.WaitGroup
	fail context.CancelCauseFunc
}

// newDaemon takes over the descriptors that the service manager passed, and creates the parts.
func newDaemon(o Options, log logger, pool *worker.Pool, registryDir string) *daemon {
	d := &daemon{
		options: o, log: log.Logger, journalRefused: log.refused, pool: pool, notifier: systemd.NewNotifier(o.Getenv),
		handed: sortDescriptors(systemd.Receive(), control.Path(o.Source.Root)), watch: make(chan struct{}), ready: make(chan struct{}),
	}
	d.watcher = fswatch.New(d.log, d.pool)
	d.parts = newParts(d, registryDir)
	d.agent = agent.New(limitDrivers(d.log), d.parts, d.options.Version)
	d.note("follow the kubelet", d.parts.kubelet.Adopt())
	return d
}

// run runs the daemon until ctx is done or a part fails. It calls begin when everything that begin
// needs runs; the daemon is ready when begin has returned and the control socket is served. The
// parts stop in the opposite order.
func (d *daemon) run(ctx context.Context, b control.Backend, begin func(context.Context) error) (err error) {
	ctx, d.fail = context.WithCancelCause(ctx)
	// These outlive ctx: registration sockets are served as long as possible.
	stopStore := d.start(ctx, "run the descriptor store", d.parts.store.Run)
	stopWatcher := d.start(ctx, "run the watcher", func(ctx context.Context) error {
		select {
		case <-d.watch:
		case <-ctx.Done():
		}
		return d.watcher.Run(ctx)
	})
	stopAgent := d.start(ctx, "run the agent", d.agent.Run)
	defer func() {
		d.fail(nil)
		d.work.Wait()
		stopAgent()
		stopWatcher()
		err = errors.Join(err, d.parts.close(context.WithoutCancel(ctx)))
		stopStore() // after it has sent all changes of the sockets
	}()

	if err := os.Remove(StoppedFile(d.options.runDir())); !errors.Is(err, fs.ErrNotExist) {
		d.note("remove the answer to an earlier stop", err)
	}
	d.live = newLiveness(ctx, d.work.Go)
	err = begin(ctx)
	if err == nil {
		err = d.serve(ctx, b)
	}
	if err != nil && ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled) {
		return nil // stopped before it was ready: not a failure
	}
	if err != nil {
		return err
	}
	// Look before READY=1: then the kubelet starts, which creates a missing root directory.
	looked, hasLooked := context.WithCancel(ctx)
	d.work.Go(func() { d.guardSandbox(ctx, hasLooked) })
	<-looked.Done()
	if err := d.notifier.Ready(); err != nil {
		return err
	}
	close(d.ready)
	d.forgetUnused()
	drivers := d.agent.Status().Drivers
	kept := slices.DeleteFunc(slices.Clone(drivers), func(s status.Driver) bool { return s.Registration != status.Registered })
	d.log.Info("ready", "MESSAGE_ID", messageReady, "version", d.options.Version,
		"drivers", len(drivers), "still_registered", len(kept), "landlock_abi", d.landlock)
	d.work.Go(func() { d.reportStatus(ctx) })
	d.work.Go(func() { d.feedWatchdog(ctx) })
	<-ctx.Done()
	d.note("notify the service manager", d.notifier.Stopping())
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	d.log.Info("stopping", "MESSAGE_ID", messageStopping)
	return nil
}

// start runs a part until stop is called, which waits for its end.
func (d *daemon) start(ctx context.Context, what string, run func(context.Context) error) (stop func()) {
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	var part sync.WaitGroup
	part.Go(func() { d.note(what, run(ctx)) })
	return func() {
		end()
		part.Wait()
	}
}

// note logs an error that does not end the daemon. what names the failed action.
func (d *daemon) note(what string, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		d.log.Error("cannot "+what, "error", err)
	}
}

// serve opens the control socket and the sockets for health and metrics.
func (d *daemon) serve(ctx context.Context, b control.Backend) error {
	d.serveControl(ctx, b)
	for _, ln := range d.handed.http {
		d.servePublic(ctx, ln, control.PublicHandler(b))
	}
	return d.serveTCP(ctx, d.options.HTTP, control.PublicHandler(b))
}

// serveTCP serves h on a TCP address, if there is one.
func (d *daemon) serveTCP(ctx context.Context, address string, h http.Handler) error {
	if address == "" {
		return nil
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("cannot serve health: %w", err)
	}
	d.servePublic(ctx, ln, h)
	return nil
}

func (d *daemon) servePublic(ctx context.Context, ln net.Listener, h http.Handler) {
	d.work.Go(func() { d.note("serve health", control.ServePublic(ctx, ln, h, d.log)) })
}

// serveControl serves the control socket that the service manager passed, or creates one. While
// another daemon serves the path, this one runs without, and takes over when the other ends.
func (d *daemon) serveControl(ctx context.Context, b control.Backend) {
	serve := func(ln net.Listener) {
		d.note("serve the control socket", control.Serve(ctx, ln, b, d.log))
	}
	for _, ln := range d.handed.control {
		d.work.Go(func() { serve(ln) })
	}
	if len(d.handed.control) > 0 {
		return
	}
	path := control.Path(d.options.Source.Root)
	ln, err := control.Listen(ctx, path)
	if err == nil {
		d.work.Go(func() { serve(ln) })
		return
	}
	d.log.Warn("working without a control socket, so `csi-registrar status` does not reach this daemon", "error", err)
	hints := d.watcher.Subscribe(path)
	d.work.Go(func() {
		defer hints.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case <-hints.Hints():
			}
			if ln, err := control.Listen(ctx, path); err == nil {
				d.log.Info("this daemon serves the control socket now")
				serve(ln)
				return
			}
		}
	})
}

// onHangup calls f at each SIGHUP until ctx is done. A later one is ignored: it must not end the
// process while it stops.
func (d *daemon) onHangup(ctx context.Context, f func()) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	d.work.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
				f()
			}
		}
	})
}

// Options are the daemon's command line and environment.
type Options struct {
	Source      config.Source // where the configuration files are
	HTTP        string        // TCP address that serves health and metrics as well; empty: none
	KeepSockets bool          // leave the sockets in the descriptor store when the daemon ends
	Version     string
	Getenv      func(string) string // os.Getenv
	Stderr      io.Writer           // for the log, unless it goes to the journal
}

// runDir is the daemon's directory: control socket, records, last good configuration.
func (o Options) runDir() string { return RunDir(o.Source.Root) }

// RunDir is the daemon's directory below root.
func RunDir(root string) string { return filepath.Join(root, "run", "csi-registrar") }

// stateDir is the directory for what the next process needs, apart from the registrations.
func stateDir(runDir string) string { return filepath.Join(runDir, "state") }

// StoppedFile returns the file with the answer to `cleanup --ask`: whether the unit was stopped for
// good. The answer concerns the daemon that has ended, so the next one removes it before it creates
// a socket.
func StoppedFile(runDir string) string { return filepath.Join(stateDir(runDir), "stopped") }
