package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
)

const (
	// settle is the delay between the first hint and reading the files: an editor or a package
	// manager writes more than once. Changes take effect within a second.
	settle = 500 * time.Millisecond

	// readLimit is how long reading the files may take.
	readLimit = 2 * time.Second
)

// configReloader keeps a configuration in force:
//
//	files      last good one   in force
//	no errors  any             the files, and for a grace period what disappeared from them
//	errors     there is one    the last good one
//	errors     none            the valid part of the files, over that of before (partial)
type configReloader struct {
	*daemon
	level *slog.LevelVar

	source   config.Source
	load     func(config.Source) *config.Result // config.Load
	slot     *worker.Slot                       // of load
	answered chan struct{}                      // capacity one: an abandoned load has returned
	requests chan func(context.Context)         // called by follow
	ended    chan struct{}                      // closed when follow has returned
	// leftovers has capacity one: the next configuration for removeLeftovers.
	leftovers chan *config.Config

	// The fields below belong to begin, and then to the goroutine in follow.
	lastGood string // the path of the last good configuration
	inForce  *config.InForce
	complete bool // inForce is the whole configuration in the files
	partial  bool // inForce is the valid part of the files
	left     bool // the process ends, see leaveRootDir
	grace    config.Grace
	next     time.Time // when the files are read again; zero: when there is a hint
	links    []string  // among the files, to be watched
	reported string    // the errors that were logged last
}

func newReloader(pool *worker.Pool, source config.Source, load func(config.Source) *config.Result) *configReloader {
	r := &configReloader{
		source: source, load: load, answered: make(chan struct{}, 1), requests: make(chan func(context.Context)),
		ended: make(chan struct{}), leftovers: make(chan *config.Config, 1),
	}
	r.slot = pool.Slot(filepath.Dir(source.Watch()[0]), func() { rate.Hint(r.answered) })
	return r
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
// If the files have errors, it returns inForce. To rename a driver is an error while its volumes
// are in use.
func (r *configReloader) keep(res *config.Result, inForce *config.InForce, atOnce bool, volumes *volumeCount) *config.InForce {
	if res.RejectRenamed(inForce, volumes.mustStay) {
		r.next = rate.Earliest(r.next, time.Now().Add(r.grace.Period))
	}
	if len(res.Errors) > 0 {
		return inForce
	}
	kept := r.grace.Keep(inForce, res, time.Now(), atOnce, volumes.mustStay)
	r.next = rate.Earliest(r.next, kept.Next)
	after := time.Until(kept.Next).Round(time.Second)
	for _, name := range kept.Disappeared {
		r.log.Warn("driver disappeared from the configuration; it is withdrawn after the grace period unless its volumes are in use", "driver", name, "after", after)
	}
	for _, d := range kept.Staying {
		r.log.Warn("driver disappeared from the configuration, and stays registered", "driver", d.Name, "reason", d.KeptFor)
	}
	if kept.RootDir {
		r.log.Warn("root_dir disappeared with its file; it is changed after the grace period", "root_dir", inForce.Kubelet.RootDir, "after", after)
	}
	return kept.InForce
}

// apply puts c in force in place of before. Only if it is complete are other drivers withdrawn. It
// returns what a user who requested it should know.
func (r *configReloader) apply(ctx context.Context, c, before *config.InForce, complete bool, volumes *volumeCount) (notes []string) {
	_ = r.level.UnmarshalText([]byte(c.Log.Level)) // config has checked it
	if r.inForce != nil && r.inForce.Log.Format != c.Log.Format {
		r.log.Warn("log.format takes effect at the next start", "format", c.Log.Format)
	}
	for _, d := range c.Drivers {
		if d.KeptFor != "" {
			notes = append(notes, d.Name+" stays registered: "+d.KeptFor)
		}
	}
	for _, d := range before.Drivers {
		if after, _ := c.Driver(d.Name); !d.Enabled || after.Enabled {
			continue
		}
		if inUse := volumes.inUse(d.Name); inUse != "" {
			const text = "the kubelet cannot unmount its volumes until it is registered again"
			r.log.Warn("withdrawing a driver: "+text, "driver", d.Name, "volumes", inUse)
			notes = append(notes, fmt.Sprintf("%s is withdrawn with %s: %s", d.Name, inUse, text))
		}
	}
	if err := r.agent.Apply(ctx, c.Config, c.Files); err != nil { // the agent tries again
		r.log.Warn("the configuration is in force, and not everything is done yet", "error", err)
		notes = append(notes, "the configuration is in force; "+err.Error())
	}
	r.inForce, r.complete = c, complete
	if !complete {
		return notes
	}
	r.note("keep the configuration for the next start", config.SaveLastGood(r.lastGood, c))
	select {
	case r.leftovers <- c.Config:
	case <-r.leftovers: // replace a configuration that was not received yet
		r.leftovers <- c.Config
	}
	return notes
}

// reload implements the command: it does at once what otherwise has a grace period. With force,
// also drivers whose volumes are in use are withdrawn. The notes are for the user.
func (r *configReloader) reload(ctx context.Context, force bool) ([]string, error) {
	var notes []string
	var err error // both belong to follow until done is closed
	done := make(chan struct{})
	request := func(ctx context.Context) {
		notes, err = r.readAndApply(ctx, true, force)
		close(done)
	}
	select {
	case r.requests <- request:
	case <-r.ended:
		return nil, errors.New("the daemon is stopping")
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
	select {
	case <-done: // also if the process ends after it
		return notes, err
	default:
		return nil, context.Cause(ctx)
	}
}

// readAndApply reads the files and applies them, without a grace period if atOnce. If they have
// errors, nothing changes, unless there never was a configuration without errors.
func (r *configReloader) readAndApply(ctx context.Context, atOnce, force bool) (notes []string, err error) {
	r.next = time.Time{}
	res := r.read(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	r.links = res.Links
	volumes := r.newVolumeCount(ctx, r.inForce.Kubelet.RootDir, force)
	c := r.keep(res, r.inForce, atOnce, volumes)
	r.checkRootDir(ctx, res, c, r.inForce, volumes)
	r.report(res, r.inForce)
	if len(res.Errors) > 0 {
		if c := res.Over(r.inForce); r.partial && !r.inForce.Equal(c) {
			r.apply(ctx, c, r.inForce, false, volumes)
		}
		return nil, res.Errors
	}
	r.partial = false
	if c.Kubelet != r.inForce.Kubelet {
		r.leaveRootDir(ctx, c)
		return []string{ErrRootDir.Error()}, nil
	}
	if !atOnce && r.complete && r.inForce.Equal(c) {
		return nil, nil
	}
	notes = r.apply(ctx, c, r.inForce, true, volumes)
	r.log.Info("configuration applied", "MESSAGE_ID", messageApplied, "drivers", len(c.Drivers), "files", len(c.Files))
	return notes, nil
}

// mostReported limits the errors in the log: a file can have one in each line.
const mostReported = 20

// report shows the errors in the status, and logs them if they have changed.
func (r *configReloader) report(res *config.Result, inForce *config.InForce) {
	text := res.Errors.Error()
	tables, files := res.LeftOut()
	invalid := map[string]string{}
	for name, errs := range tables {
		invalid[name] = strings.ReplaceAll(errs.Error(), "\n", "; ")
	}
	if len(res.Errors) > 0 && !r.partial { // nothing in the files takes effect
		later := "it takes effect when this is corrected: " + res.Errors[0].Error()
		for _, d := range res.Config.Drivers {
			if was, ok := inForce.Driver(d.Name); d.Enabled && !ok || ok && !was.Equal(d) {
				invalid[d.Name] = later
			}
		}
		// The tables of a file that were in force still are.
		files = slices.DeleteFunc(files, func(file string) bool {
			return slices.ContainsFunc(inForce.Files, func(f string) bool { return rootdir.Within(f, file) })
		})
	}
	r.agent.ConfigErrors(text, invalid, files)
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
	var watched []string                                 // of r.links
	hints := r.watcher.SubscribeDir(r.source.Watch()...) // with a first hint, as below
	defer func() { hints.Close() }()
	for {
		select {
		case <-ctx.Done():
			return
		case <-hints.Hints():
			r.next = rate.Earliest(r.next, time.Now().Add(settle))
			continue
		case request := <-r.requests:
			request(ctx)
		case <-r.answered:
			_, _ = r.readAndApply(ctx, false, false) // it logs its errors
		case <-rate.At(r.next):
			_, _ = r.readAndApply(ctx, false, false) // as above
		}
		if r.left {
			r.fail(ErrRootDir)
			return
		}
		if !slices.Equal(watched, r.links) {
			watched = r.links
			hints.Close()
			hints = r.watcher.SubscribeDir(append(r.source.Watch(), watched...)...)
		}
	}
}
