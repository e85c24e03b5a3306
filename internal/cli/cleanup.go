package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"csi-registrar/internal/daemon"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/worker"
)

// Two processes clean up after a daemon that was stopped for good. One may talk to the service
// manager, so it could start any unit; it reads nothing that the daemon wrote. The other trusts the
// daemon's records and runs in the daemon's sandbox. A file passes the answer from the first to the
// second, and each start of the daemon removes it. When --ask writes it, the daemon has ended and
// cannot change it; and what --if-stopped does, the daemon may do itself.
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
		stopped, rootDir := isStopping, e.getenv(systemd.RootDirVariable)
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

// isStopping reports whether our unit has a stop job, as it also has at poweroff. With a restart
// job, or without a job (after a crash), the next process takes over the sockets.
func isStopping(ctx context.Context) (bool, error) {
	job, err := systemd.Job(ctx, "")
	return job == systemd.JobStop, err
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
	path := daemon.StoppedFile(runDir)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return false, fmt.Errorf("cannot write the service manager's answer: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("cannot remove an earlier answer: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, unansweredMode)
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

// createLimit is the time for the directories, whose file system may not answer.
const createLimit = 2 * time.Second

// createDirectories creates what is missing of the directories that the next sandbox opens below
// rootDir, and their parents, with the modes of the kubelet's. A sandbox does not open a directory
// that is created later, and the kubelet creates all of them but the last.
func createDirectories(ctx context.Context, rootDir string) error {
	links := rootdir.EndpointLinks(rootDir)
	create := func() error {
		for _, dir := range []string{rootDir, rootdir.PluginsRegistry(rootDir), filepath.Dir(links), links} {
			err := os.Mkdir(dir, 0o750)
			if errors.Is(err, fs.ErrExist) {
				continue
			}
			if err == nil {
				err = os.Chmod(dir, 0o750) // whatever the umask is
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	err, late := worker.Do(ctx, worker.NewPool().Slot(rootDir, nil), createLimit, create, nil)
	if err = cmp.Or(late, err); err != nil {
		return fmt.Errorf("cannot create what the next sandbox needs: %w", err)
	}
	return nil
}

// removeIfStopped removes the registration sockets if the answer was yes.
func removeIfStopped(ctx context.Context, e *env, runDir string) error {
	// Read the records before the answer: a daemon that starts later has other sockets.
	left, leftErr := kubelet.Recorded(runDir)
	answer, err := os.Lstat(daemon.StoppedFile(runDir))
	if errors.Is(err, fs.ErrNotExist) || err == nil && answer.Mode() != stoppedMode {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot read the service manager's answer: %w", err)
	}
	removed, err := left.Remove()
	pool := worker.NewPool()
	for _, path := range removed {
		fmt.Fprintf(e.stdout, "removed %s\n", path)
		all, err := volumes.Count(ctx, pool, filepath.Dir(filepath.Dir(path)))
		if err != nil {
			fmt.Fprintf(e.stderr, "warning: the volumes in use are not known: %v\n", err)
		}
		for driver, n := range all {
			if filepath.Base(path) == rootdir.SocketName(driver) {
				fmt.Fprintf(e.stderr, "warning: volumes of %s are in use (%d published, %d staged); the kubelet cannot unmount them until it is registered again\n",
					safetext.Word(driver), n.Published, n.Staged)
			}
		}
	}
	if err := errors.Join(leftErr, err); err != nil {
		return fmt.Errorf("cannot remove all registration sockets: %w", err)
	}
	return nil
}
