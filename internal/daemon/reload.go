package daemon

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/worker"
)

const (
	// settle is the delay between the first hint and reading the files: an editor or a package
	// manager writes more than once. Changes take effect within a second.
	settle = 500 * time.Millisecond

	// readLimit is how long reading the files may take.
	readLimit = 2 * time.Second
)

// Run runs the daemon with configuration files until ctx is done.
func Run(ctx context.Context, o Options) error { return run(ctx, o, config.Load) }

func run(ctx context.Context, o Options, load func(config.Source) *config.Result) error {
	pool := worker.NewPool()
	r := newReloader(pool, o.Source, load)
	res := r.read(ctx)
	log, level := newLogger(o.Stderr, res.Config.Log)
	d := newDaemon(o, log, pool, "")
	r.daemon, r.level = d, level
	return d.run(ctx, backend{d.agent, d, r.reload}, func(ctx context.Context) error {
		r.begin(ctx, res)
		d.work.Go(func() { r.follow(ctx) })
		d.work.Go(func() { r.withdrawUnclaimed(ctx) })
		d.onHangup(ctx, func() { d.note("reloading", r.reload(ctx)) })
		return nil
	})
}

// configReloader keeps a configuration in force: that of the files if they have no errors,
// otherwise the last good one.
type configReloader struct {
	*daemon
	level *slog.LevelVar

	source   config.Source
	load     func(config.Source) *config.Result // config.Load
	slot     *worker.Slot                       // of load
	answered chan struct{}                      // capacity one: an abandoned load has returned
	requests chan chan<- error                  // requests to reload; each receives the result
	ended    chan struct{}                      // closed when follow has returned
	// unclaimed has capacity one: the next configuration for withdrawUnclaimed.
	unclaimed chan *config.Config

	// The fields below belong to begin, and then to the goroutine in follow.
	lastGood string // the path of the last good configuration
	inForce  *config.InForce
	complete bool // inForce is the whole configuration in the files
	// there was no last good configuration: inForce is the valid part of the files
	partial  bool
	grace    config.Grace
	next     schedule
	links    []string // among the files, to be watched
	reported string   // the errors that were logged last
}

func newReloader(pool *worker.Pool, source config.Source, load func(config.Source) *config.Result) *configReloader {
	r := &configReloader{source: source, load: load, answered: make(chan struct{}, 1), requests: make(chan chan<- error), ended: make(chan struct{}), unclaimed: make(chan *config.Config, 1)}
	r.slot = pool.Slot(filepath.Dir(source.Watch()[0]), func() {
		select {
		case r.answered <- struct{}{}:
		default:
		}
	})
	return r
}

// schedule is the time at which the files are read next.
type schedule struct{ at time.Time } // zero: when there is a hint

// noLater moves the time to t if it is later, unless t is zero.
func (s *schedule) noLater(t time.Time) {
	if s.at.IsZero() || !t.IsZero() && t.Before(s.at) {
		s.at = t
	}
}

// read reads the files. If that takes too long, the Result has only that error, and the files are
// read again when the abandoned call has returned.
func (r *configReloader) read(ctx context.Context) *config.Result {
	res, err := worker.Do(ctx, r.slot, readLimit, func() *config.Result { return r.load(r.source) }, nil)
	if err != nil {
		return &config.Result{Config: config.Default(), Links: r.links, Errors: config.Errors{{
			File: filepath.Dir(r.source.Watch()[0]), Problem: "cannot be read: " + err.Error(),
			Hint: "the previous configuration stays in force"}}}
	}
	return res
}

// keep returns the configuration in the files, with the settings that just disappeared from them.
func (r *configReloader) keep(ctx context.Context, res *config.Result, inForce *config.InForce) *config.InForce {
	kept := r.grace.Keep(inForce, res, time.Now(), func(name string) string { return r.inUse(ctx, inForce.Kubelet.RootDir, name) })
	r.next.noLater(kept.Next)
	after := time.Until(kept.Next).Round(time.Second)
	for _, name := range kept.Disappeared {
		r.log.Warn("driver disappeared from the configuration; it is withdrawn after the grace period", "driver", name, "after", after)
	}
	for _, d := range kept.Staying {
		r.log.Warn("driver disappeared from the configuration, and stays registered", "driver", d.Name, "reason", d.KeptFor)
	}
	if kept.RootDir {
		r.log.Warn("root_dir disappeared with its file; it is changed after the grace period", "root_dir", inForce.Kubelet.RootDir, "after", after)
	}
	return kept.InForce
}

// apply puts c in force. Only if it is complete are other drivers withdrawn.
func (r *configReloader) apply(ctx context.Context, c *config.InForce, complete bool) error {
	r.level.Set(logLevel(c.Log.Level))
	if r.inForce != nil && r.inForce.Log.Format != c.Log.Format {
		r.log.Warn("log.format takes effect at the next start", "format", c.Log.Format)
	}
	err := r.agent.Apply(ctx, c.Config, c.Files) // the agent retries what failed
	r.inForce, r.complete = c, complete
	if !complete {
		return err
	}
	r.note("keeping the configuration", config.SaveLastGood(r.lastGood, c))
	select {
	case r.unclaimed <- c.Config:
	case <-r.unclaimed: // replace a configuration that was not received yet
		r.unclaimed <- c.Config
	}
	return err
}

// withdrawUnclaimed withdraws drivers that an earlier process registered and the configuration no
// longer has. It does not delay a start, and withdraws a few at a time: there can be thousands.
func (r *configReloader) withdrawUnclaimed(ctx context.Context) {
	const together = 32
	select {
	case <-ctx.Done():
	case <-r.ready:
	}
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-r.unclaimed:
			for names := range slices.Chunk(r.parts.unclaimed(c), together) {
				r.note("withdrawing", r.agent.WithdrawKept(ctx, names))
			}
		}
	}
}

// reload implements the command: drivers that disappeared from the files are withdrawn immediately.
func (r *configReloader) reload(ctx context.Context) error {
	done := make(chan error, 1)
	select {
	case r.requests <- done:
	case <-r.ended:
		return errors.New("the daemon is stopping")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// readAndApply reads the files and applies them. If they have errors, nothing changes, unless there
// never was a configuration without errors.
func (r *configReloader) readAndApply(ctx context.Context, grace bool) error {
	r.next = schedule{}
	res := r.read(ctx)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	r.links = res.Links
	r.report(res)
	if len(res.Errors) > 0 {
		if c := res.Over(r.inForce); r.partial && !r.inForce.Equal(c) {
			r.note("applying the configuration", r.apply(ctx, c, false))
		}
		return res.Errors
	}
	r.partial = false
	c := res.InForce()
	if grace {
		if c = r.keep(ctx, res, r.inForce); r.complete && r.inForce.Equal(c) {
			return nil
		}
	} else {
		r.grace = config.Grace{}
	}
	if err := r.apply(ctx, c, true); err != nil {
		return err
	}
	r.log.Info("configuration applied", "MESSAGE_ID", messageApplied, "drivers", len(c.Drivers), "files", len(c.Files))
	return nil
}

// mostReported limits the errors in the log: a file can have one in each line.
const mostReported = 20

// report shows the errors in the status, and logs them if they have changed.
func (r *configReloader) report(res *config.Result) {
	text := ""
	if len(res.Errors) > 0 {
		text = res.Errors.Error()
	}
	r.agent.ConfigError(text)
	if text == r.reported {
		return
	}
	r.reported = text
	for _, e := range res.Errors[:min(len(res.Errors), mostReported)] {
		r.log.Error("error in the configuration", "MESSAGE_ID", messageConfigError, "error", e)
	}
	if more := len(res.Errors) - mostReported; more > 0 {
		r.log.Error("more errors in the configuration; `csi-registrar config check` names all", "MESSAGE_ID", messageConfigError, "more", more)
	}
}

// follow applies changes of the files, and handles requests.
func (r *configReloader) follow(ctx context.Context) {
	defer close(r.ended)
	var watched []string // of r.links
	hints := r.watcher.SubscribeDir(r.source.Watch()...)
	defer func() { hints.Close() }()
	r.next.noLater(time.Now()) // for changes before the files were watched
	for {
		var due <-chan time.Time
		if !r.next.at.IsZero() {
			due = time.After(time.Until(r.next.at))
		}
		var err error
		select {
		case <-ctx.Done():
			return
		case <-hints.Hints():
			r.next.noLater(time.Now().Add(settle))
			continue
		case done := <-r.requests:
			done <- r.readAndApply(ctx, false)
		case <-r.answered:
			err = r.readAndApply(ctx, true)
		case <-due:
			err = r.readAndApply(ctx, true)
		}
		// Errors in the files were reported, and why the process ends will be; log all others.
		if _, inFiles := errors.AsType[config.Errors](err); err != nil && !inFiles && ctx.Err() == nil {
			r.note("applying the configuration", err)
		}
		if !slices.Equal(watched, r.links) {
			watched = r.links
			hints.Close()
			hints = r.watcher.SubscribeDir(append(r.source.Watch(), watched...)...)
			r.next.noLater(time.Now().Add(settle)) // as above
		}
	}
}
