package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// ErrRootDir ends the process so that the service manager starts another one for the root_dir in
// the files. The registration sockets below the earlier one are removed.
var ErrRootDir = errors.New("root_dir was changed: the service manager starts another process for it")

// checkRootDir makes a root_dir that cannot replace the one in force an error in the files: it must
// exist and be writable, and the kubelet could not unmount volumes that are in use below the
// earlier one. It is checked again after a grace period.
func (r *configReloader) checkRootDir(ctx context.Context, res *config.Result, c, inForce *config.InForce, volumes *volumeCount) {
	if len(res.Errors) > 0 || c.Kubelet == inForce.Kubelet {
		return
	}
	root, was := c.Kubelet.RootDir, safetext.Word(inForce.Kubelet.RootDir)
	if err := worker.Run(ctx, r.pool.Slot(root, nil), readLimit, func() error { return writable(root) }); err != nil {
		res.RejectRootDir(inForce, fmt.Sprintf("%s cannot replace %s: %v", safetext.Word(root), was, err),
			"create it, and see csi-registrar config check for the drop-in of the unit")
	}
	for _, d := range inForce.Drivers {
		if inUse := volumes.inUse(d.Name); d.Enabled && inUse != "" && !volumes.ignored {
			res.RejectRootDir(inForce, fmt.Sprintf("%s cannot replace %s: %s has %s there, which the kubelet could not unmount", safetext.Word(root), was, d.Name, inUse),
				"it takes effect when they are unmounted, or by csi-registrar reload --force")
		}
	}
	if r.inForce != nil && (r.notifier == nil || !r.options.KeepSockets) && len(res.Errors) == 0 {
		res.RejectRootDir(inForce, fmt.Sprintf("%s cannot replace %s while the daemon runs", safetext.Word(root), was), "restart it")
	}
	if len(res.Errors) > 0 {
		r.next.noLater(time.Now().Add(r.grace.Period))
	}
}

// writable checks that the plugins_registry below rootDir can be written, or rootDir if the kubelet
// has not created it yet.
func writable(rootDir string) error {
	err := unix.Access(rootdir.PluginsRegistry(rootDir), unix.W_OK)
	if errors.Is(err, fs.ErrNotExist) {
		err = unix.Access(rootDir, unix.W_OK)
	}
	return err
}

// leaveRootDir withdraws all drivers, so that the process can end. The next one puts c in force.
func (r *configReloader) leaveRootDir(ctx context.Context, c *config.InForce) {
	r.log.Info("root_dir was changed", "from", r.inForce.Kubelet.RootDir, "to", c.Kubelet.RootDir)
	if err := r.agent.Leave(ctx, &config.Config{Kubelet: r.inForce.Kubelet, Log: r.inForce.Log, Drivers: c.Drivers}, ErrRootDir); err != nil {
		r.log.Warn("not all registration sockets below the earlier root_dir are removed", "error", err)
	}
	// so that it is not checked again
	r.note("keep the configuration for the next start", config.SaveLastGood(r.lastGood, c))
	r.left = true
}
