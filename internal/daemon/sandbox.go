package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/worker"
)

// errSandbox ends the process so that the manager starts it again: its view of the file
// system was made at start and cannot be changed from within.
var errSandbox = errors.New("the kubelet's root directory was made after this process was started, whose sandbox shows it read-only; " +
	"the service manager starts another one, and what is registered stays")

// guardSandbox notices that the kubelet's root directory was made after the start, or made again, as
// when a node is reset and joined again. ReadWritePaths= of the unit did not hold it: it is
// read-only in here, for ever. A new process has a new view, and registrations stay in
// the descriptor store. It cannot go on for ever: only a process that saw the directory
// writable, or missing, ends. It calls looked after its first look.
func (d *daemon) guardSandbox(ctx context.Context, looked func()) {
	defer looked()
	registry := d.agent.Status().PluginsRegistry // the one at start: of the unit's sandbox
	if d.notifier == nil || !d.options.KeepSockets || registry == "" {
		return // nobody would start us again, or a flag named the directory
	}
	dir := filepath.Dir(registry)
	hints := d.watcher.Subscribe(dir)
	defer hints.Close()
	slot := d.pool.Slot(dir, hints.Hint)
	anotherMaySeeMore := false
	for {
		seen, err := worker.Do(ctx, slot, time.Second, func() error {
			var st unix.Statfs_t
			if err := unix.Statfs(dir, &st); err != nil || st.Flags&unix.ST_RDONLY == 0 {
				return err
			}
			return errSandbox
		}, nil)
		switch err := cmp.Or(err, seen); {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			anotherMaySeeMore = true
		case !errors.Is(err, errSandbox):
			d.log.Debug("looking at the root directory", "error", err)
		case anotherMaySeeMore:
			d.fail(fmt.Errorf("%s: %w", dir, errSandbox))
			return
		}
		looked()
		select {
		case <-ctx.Done():
			return
		case <-hints.Hints():
		}
	}
}
