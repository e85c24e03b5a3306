package daemon

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/worker"
)

// Run runs the daemon with configuration files until ctx is done.
func Run(ctx context.Context, o Options) error { return run(ctx, o, config.Load, config.GracePeriod) }

func run(ctx context.Context, o Options, load func(config.Source) *config.Result, period time.Duration) error {
	pool := worker.NewPool()
	r := newReloader(pool, o.Source, load)
	r.grace.Period = period
	res := r.read(ctx)
	log := newLogger(o.Stderr, res.Config.Log)
	defer log.queue.Close()
	d := newDaemon(o, log, pool, "")
	defer d.notifier.Close()
	r.daemon, r.level = d, log.level
	return d.run(ctx, backend{d.agent, d, r.reload}, func(ctx context.Context) error {
		if err := r.begin(ctx, res); err != nil {
			return err
		}
		d.work.Go(func() { r.follow(ctx) })
		d.work.Go(func() { r.removeLeftovers(ctx) })
		d.onHangup(ctx, func() {
			_, err := r.reload(ctx, false)
			d.note("reload the configuration", err)
		})
		return nil
	})
}

// begin puts the first configuration in force. If the files have errors, it uses the last good
// configuration or, if there is none, the valid part of the files.
func (r *configReloader) begin(ctx context.Context, res *config.Result) error {
	if err := os.MkdirAll(stateDir(r.options.runDir()), 0o755); err != nil {
		r.log.Warn("cannot keep state over a restart", "error", err)
	}
	r.lastGood = filepath.Join(stateDir(r.options.runDir()), lastGoodName(r.source))
	c, before := res.InForce(), &config.InForce{Config: config.Default()}
	good, err := config.LoadLastGood(r.lastGood)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("starting without the last good configuration", "error", err)
	}
	volumes := r.newVolumeCount(ctx, c.Kubelet.RootDir, false)
	if len(res.Errors) == 0 && good != nil {
		before = served(good, r.parts.unclaimed(c.Config))
		volumes = r.newVolumeCount(ctx, good.Kubelet.RootDir, false)
		c = r.keep(res, before, false, volumes)
		r.checkRootDir(ctx, res, c, good, volumes)
	}
	r.partial = good == nil && len(res.Errors) > 0
	r.report(res, good)
	switch {
	case r.partial:
		r.log.Warn("starting with the valid part of the configuration files", "drivers", len(c.Drivers), "left_out", res.Faulty)
	case len(res.Errors) > 0:
		c = good
		r.log.Warn("starting with the last good configuration", "drivers", len(c.Drivers))
	}
	roots := []string{c.Kubelet.RootDir}
	if good != nil { // what is left there has to be removed
		roots = append(roots, good.Kubelet.RootDir)
	}
	r.confine(ctx, roots...)
	if err := r.parts.open(c.Kubelet.RootDir); err != nil {
		return err
	}
	r.apply(ctx, c, before, len(res.Errors) == 0, volumes)
	return nil
}

// served returns the last good configuration with only those drivers whose registration sockets are
// in the descriptor store: the grace period delays a withdrawal, but registers nothing.
func served(good *config.InForce, stored []string) *config.InForce {
	c := *good.Config
	c.Drivers = slices.DeleteFunc(slices.Clone(c.Drivers), func(d config.Driver) bool {
		return !slices.Contains(stored, d.Name)
	})
	// The files no longer have socket_owner, and a value that an earlier process wrote must not
	// relax the check.
	for i, d := range c.Drivers {
		c.Drivers[i].SocketOwner = config.DefaultDriver(d.Name, d.Socket).SocketOwner
	}
	return &config.InForce{Config: &c, Files: good.Files, RootDirFile: good.RootDirFile}
}

// lastGoodName returns the name of the file: one for the directories, one for each --config FILE.
func lastGoodName(s config.Source) string {
	if s.File == "" {
		return "last-good.json"
	}
	h := fnv.New32a()
	h.Write([]byte(s.File))
	return fmt.Sprintf("last-good-%08x.json", h.Sum32())
}
