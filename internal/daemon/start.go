package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// begin puts the first configuration in force. If the files have errors, that is the last good one,
// or, if there is none, the valid part of the files.
func (r *configReloader) begin(ctx context.Context, res *config.Result) {
	if err := os.MkdirAll(stateDir(r.options.runDir()), 0o755); err != nil {
		r.log.Warn("cannot keep state over a restart", "error", err)
	}
	r.lastGood = filepath.Join(stateDir(r.options.runDir()), lastGoodName(r.source))
	r.report(res)
	c := res.InForce()
	good, err := config.LoadLastGood(r.lastGood)
	if errors.Is(err, fs.ErrNotExist) { // packages of 0.1.0 have it one directory higher
		good, err = config.LoadLastGood(filepath.Join(r.options.runDir(), lastGoodName(r.source)))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("starting without the last good configuration", "error", err)
	}
	switch {
	case len(res.Errors) == 0 && good != nil:
		c = r.keep(ctx, res, served(good, r.parts.unclaimed(c.Config)))
	case len(res.Errors) == 0:
	case good != nil:
		c = good
		r.log.Warn("starting with the last good configuration", "drivers", len(c.Drivers))
	default:
		r.partial = true
		r.log.Warn("starting with the valid part of the configuration files", "drivers", len(c.Drivers), "left_out", res.Faulty)
	}
	roots := []string{c.Kubelet.RootDir, config.Default().Kubelet.RootDir}
	if good != nil { // registrations there may have to be withdrawn
		roots = append(roots, good.Kubelet.RootDir)
	}
	r.confine(ctx, roots...)
	r.adviseDropIn(ctx, c.Kubelet.RootDir)
	r.note("sweeping stale sockets", r.parts.sweep(ctx, c.Config, len(res.Errors) == 0))
	r.note("applying the configuration", r.apply(ctx, c, len(res.Errors) == 0))
}

// adviseDropIn logs the drop-in that another root_dir needs, if the unit does not have it yet.
func (r *configReloader) adviseDropIn(ctx context.Context, rootDir string) {
	lines := systemd.DropIn(rootDir)
	if lines == "" || r.notifier == nil {
		return
	}
	registry := rootdir.PluginsRegistry(rootDir)
	err, late := worker.Do(ctx, r.slot, readLimit, func() error { return unix.Access(registry, unix.W_OK) }, nil)
	if cmp.Or(late, err) != nil {
		r.log.Info("the plugins_registry cannot be written: unless the kubelet creates it later, this root_dir needs a drop-in of the unit", "root_dir", rootDir, "drop_in", lines, "error", cmp.Or(late, err))
	}
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
