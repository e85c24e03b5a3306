package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/daemon"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// Two processes clean up after a daemon that was stopped for good. One may talk to the service
// manager, so it could start any unit; it reads nothing that the daemon wrote. The other trusts the
// daemon's records and runs in the daemon's sandbox. A file passes the answer from the first to the
// second, and each start of the daemon removes it. When --ask writes it, the daemon has ended and
// cannot change it. --if-stopped can do no more than the daemon itself.
func setupCleanup(fs *flag.FlagSet) runner {
	ask := fs.Bool("ask", false, "ask the service manager whether it is stopping the unit of this process, and store the answer in /run/csi-registrar/state/stopped")
	unit := fs.String("unit", "", "with --ask: ask instead whether `UNIT` is down and will not be started")
	ifStopped := fs.Bool("if-stopped", false, "remove the registration sockets if the answer was yes")
	root := fs.String("config-root", "/", "the `DIR` below which the daemon's run directory is")
	return func(ctx context.Context, e *env, _ []string) error {
		if *ask == *ifStopped {
			return usagef("either --ask or --if-stopped is needed; without them nothing is cleaned up")
		}
		if *unit != "" && !*ask {
			return usagef("--unit is for --ask only")
		}
		runDir := daemon.RunDir(*root)
		if *ifStopped {
			return removeIfStopped(ctx, e, runDir)
		}
		stopped, rootDir := systemd.Stopping, e.getenv(rootdir.RootDirVariable)
		if *unit != "" {
			// The unit was stopped in the middle of a restart, after its own processes had asked.
			stopped, rootDir = func(ctx context.Context) (bool, error) { return systemd.Down(ctx, *unit) }, ""
		}
		isStopped, err := askIfStopped(ctx, e, runDir, stopped)
		if !isStopped && rootDir != "" {
			err = errors.Join(err, createDirectories(ctx, rootDir))
		}
		return err
	}
}

// The answer is the mode of an empty file: setting a mode needs no space, and /run may be full.
const (
	unansweredMode fs.FileMode = 0o600
	stoppedMode    fs.FileMode = 0o700
)

// askIfStopped writes the answer. If the manager cannot be asked, the sockets stay: a dead socket,
// which the next start removes, does less harm than a lost registration.
func askIfStopped(ctx context.Context, e *env, runDir string, stopped func(context.Context) (bool, error)) (isStopped bool, err error) {
	// Create the file before asking: a daemon that starts in between removes it, and the answer is
	// not used. Always create a new file, so that no link is followed.
	f, err := createAnswer(ctx, daemon.StoppedFile(runDir))
	if err != nil {
		return false, fmt.Errorf("cannot write the service manager's answer: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	isStopped, err = stopped(ctx)
	if err != nil {
		fmt.Fprintf(e.stderr, "warning: keeping the registration sockets: %v\n", err)
		return false, nil
	}
	if isStopped {
		if err := f.Chmod(stoppedMode); err != nil {
			return true, fmt.Errorf("cannot write the service manager's answer: %w", err)
		}
	}
	return isStopped, nil
}

// createAnswer creates the file, in place of an earlier one.
func createAnswer(ctx context.Context, path string) (*os.File, error) {
	return worker.Get(ctx, worker.NewPool().Slot(path, nil), fileLimit, func() (*os.File, error) {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return nil, err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, unansweredMode)
	}, nil)
}

// removeLimit is the time for all sockets; TimeoutStopSec= is 30 s.
const removeLimit = 10 * time.Second

// createDirectories creates rootDir and the plugins_registry, if they are missing, with the modes
// of the kubelet's: a sandbox does not open a directory that is created later.
func createDirectories(ctx context.Context, rootDir string) error {
	create := func() error {
		for _, dir := range []string{rootDir, rootdir.PluginsRegistry(rootDir)} {
			err := os.Mkdir(dir, 0o750)
			if err == nil {
				err = os.Chmod(dir, 0o750) // whatever the umask is
			}
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
		return nil
	}
	if err := worker.Run(ctx, worker.NewPool().Slot(rootDir, nil), fileLimit, create); err != nil {
		return fmt.Errorf("cannot create what the next sandbox needs: %w", err)
	}
	return nil
}

// removeIfStopped removes the registration sockets if the answer was yes.
func removeIfStopped(ctx context.Context, e *env, runDir string) error {
	var left regsocket.Leftovers
	var leftErr error
	var answer fs.FileInfo
	pool := worker.NewPool()
	err := worker.Run(ctx, pool.Slot(runDir, nil), fileLimit, func() (err error) {
		// Read the records before the answer: a daemon that starts later has other sockets.
		left, leftErr = regsocket.Recorded(runDir)
		answer, err = os.Lstat(daemon.StoppedFile(runDir))
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && answer.Mode() != stoppedMode {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot read the service manager's answer: %w", err)
	}
	removed, err := worker.Get(ctx, pool.Slot("plugins_registry", nil), removeLimit, func() ([]string, error) {
		return left.Remove(ctx)
	}, nil)
	registries := map[string][]string{} // names of removed sockets
	for _, path := range removed {
		fmt.Fprintf(e.stdout, "removed %s\n", path)
		registries[filepath.Dir(path)] = append(registries[filepath.Dir(path)], filepath.Base(path))
	}
	for registry, names := range registries {
		all, err := volumes.Count(ctx, worker.NewPool(), filepath.Dir(registry), 0)
		if err != nil {
			fmt.Fprintf(e.stderr, "warning: the volumes in use are not known: %v\n", err)
		}
		for driver, n := range all {
			if slices.Contains(names, rootdir.SocketName(driver)) {
				fmt.Fprintf(e.stderr, "warning: volumes of %s are in use (%d published, %d staged); the kubelet cannot unmount them until it is registered again\n",
					safetext.Word(driver), n.Published+n.Waiting, n.Staged)
			}
		}
	}
	if err := errors.Join(leftErr, err); err != nil {
		return fmt.Errorf("cannot remove all registration sockets: %w", err)
	}
	return nil
}
