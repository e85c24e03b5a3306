package daemon

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/worker"
)

const (
	// settle is how long after the first hint the files are read: an editor or a package
	// manager writes more than once. What is written counts within a second.
	settle = 500 * time.Millisecond

	// readLimit is how long reading the files may take.
	readLimit = 2 * time.Second
)

// Run is the daemon with configuration files, until ctx is done.
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

// configReloader keeps the configuration in force: what the files say if they have no
// errors, else the last good one.
type configReloader struct {
	*daemon
	level *slog.LevelVar

	source   config.Source
	load     func(config.Source) *config.Result // config.Load
	slot     *worker.Slot                       // in which load runs
	answered chan struct{}                      // capacity one: an abandoned load has returned
	requests chan chan<- error                  // for a reload at once, and where its error goes
	ended    chan struct{}                      // closed when follow has returned
	// unclaimed has capacity one: the configuration that withdrawUnclaimed is to compare with next.
	unclaimed chan *config.Config

	// All below belongs to begin, and then to the goroutine in follow.
	lastGood string // the path of the last good configuration
	inForce  *config.InForce
	complete bool // inForce is all that the files say
	// there was no last good configuration: inForce is what is left of files with errors
	partial  bool
	grace    config.Grace
	next     schedule
	links    []string // of the files, to be watched
	reported string   // errors that the log has already
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

// schedule is when the files are read next.
type schedule struct{ at time.Time } // zero: when there is a hint

// by makes it t at the latest, unless t is zero.
func (s *schedule) by(t time.Time) {
	if s.at.IsZero() || !t.IsZero() && t.Before(s.at) {
		s.at = t
	}
}

// read reads the files. If that takes too long, the Result has nothing but that error: an
// abandoned load is read again when it has returned.
func (r *configReloader) read(ctx context.Context) *config.Result {
	res, err := worker.Do(ctx, r.slot, readLimit, func() *config.Result { return r.load(r.source) }, nil)
	if err != nil {
		return &config.Result{Config: config.Default(), Links: r.links, Errors: config.Errors{{
			File: filepath.Dir(r.source.Watch()[0]), Problem: "cannot be read: " + err.Error(),
			Hint: "what was read before stays in force"}}}
	}
	return res
}

// keep returns what the files say together with what disappeared from them just now.
func (r *configReloader) keep(ctx context.Context, res *config.Result, inForce *config.InForce) *config.InForce {
	kept := r.grace.Keep(inForce, res, time.Now(), func(name string) string { return r.inUse(ctx, inForce.Kubelet.RootDir, name) })
	r.next.by(kept.Next)
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

// apply brings c into force. Only if it is all that the files say are other drivers withdrawn.
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
	case <-r.unclaimed: // the one before was not looked at, and is superseded
		r.unclaimed <- c.Config
	}
	return err
}

// withdrawUnclaimed withdraws what an earlier process registered and the configuration no longer
// has. No start waits for it, and it is done little by little: there can be thousands.
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

// reload is the command: what disappeared from the files is withdrawn at once.
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

// readAndApply reads the files. With an error in them nothing changes, unless there was never a
// configuration without errors.
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

// mostReported is how many errors of one load go to the log: a file can have one in each line.
const mostReported = 20

// report makes errors known, each set of them once.
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

// follow applies changes of the files, and answers requests.
func (r *configReloader) follow(ctx context.Context) {
	defer close(r.ended)
	var watched []string // of r.links
	hints := r.watcher.SubscribeDir(r.source.Watch()...)
	defer func() { hints.Close() }()
	r.next.by(time.Now()) // for what changed before it was watched
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
			r.next.by(time.Now().Add(settle))
			continue
		case done := <-r.requests:
			done <- r.readAndApply(ctx, false)
		case <-r.answered:
			err = r.readAndApply(ctx, true)
		case <-due:
			err = r.readAndApply(ctx, true)
		}
		// What is wrong in the files was reported; everything else that can fail is noted.
		if _, inFiles := errors.AsType[config.Errors](err); err != nil && !inFiles {
			r.note("applying the configuration", err)
		}
		if !slices.Equal(watched, r.links) {
			watched = r.links
			hints.Close()
			hints = r.watcher.SubscribeDir(append(r.source.Watch(), watched...)...)
			r.next.by(time.Now().Add(settle)) // as above
		}
	}
}
