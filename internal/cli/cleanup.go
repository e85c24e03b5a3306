package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"csi-registrar/internal/daemon"
	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/rootdir"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/systemd"
	"csi-registrar/internal/volumes"
	"csi-registrar/internal/worker"
)

// Two processes clean up after a daemon that was stopped for good. One may ask the service manager,
// which means that it could start any unit, and reads nothing of the daemon's; the other believes
// the daemon's records and is in the daemon's sandbox. Between them is a file that each start of
// the daemon removes. No daemon is left to write it when --ask has been there, and what it makes
// --if-stopped do the daemon may do itself.
func setupCleanup(fs *flag.FlagSet) runner {
	ask := fs.Bool("ask", false, "ask the service manager whether it is stopping the unit that this process is part of, and keep the answer in /run/csi-registrar/state/stopped")
	unit := fs.String("unit", "", "with --ask: whether `UNIT` is down and not to be started, instead")
	ifStopped := fs.Bool("if-stopped", false, "remove the registration sockets if the answer was yes")
	root := fs.String("config-root", "/", "the `DIR` below which the daemon's run directory is")
	return func(ctx context.Context, e *env, _ []string) error {
		if *ask == *ifStopped {
			return usagef(nil, "either --ask or --if-stopped is needed; without them nothing is cleaned up")
		}
		if *unit != "" && !*ask {
			return usagef(nil, "--unit is for --ask only")
		}
		runDir := daemon.RunDir(*root)
		if *ifStopped {
			return removeIfStopped(ctx, e, runDir)
		}
		stopped := isStopping
		if *unit != "" {
			// A stop came in the middle of a restart, after the unit's own processes had
			// found that it is one.
			stopped = func(ctx context.Context) (bool, error) { return systemd.Down(ctx, *unit) }
		}
		return askIfStopped(ctx, e, runDir, stopped)
	}
}

// isStopping reports whether our unit has a stop job (a poweroff is one, too). With a restart
// job, and with none, as after a crash, the next process goes on with the sockets.
func isStopping(ctx context.Context) (bool, error) {
	job, err := systemd.Job(ctx, "")
	return job == systemd.JobStop, err
}

// The answer is the mode of an empty file. To set a mode needs no space, and /run may be full.
const (
	unansweredMode fs.FileMode = 0o600
	stoppedMode    fs.FileMode = 0o700
)

// askIfStopped writes the answer. A dead socket that is left because the manager could not be
// asked harms less than a registration lost: the next start removes it.
func askIfStopped(ctx context.Context, e *env, runDir string, stopped func(context.Context) (bool, error)) (err error) {
	// Opened before the question, and without an answer until then: a daemon that starts in between
	// removes the file, and then the answer is nobody's.
	// Always a new file: nobody's link is followed.
	path := daemon.StoppedFile(runDir)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("cannot keep the service manager's answer: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cannot remove an earlier answer: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, unansweredMode)
	if err != nil {
		return fmt.Errorf("cannot write the service manager's answer: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	isStopped, err := stopped(ctx)
	if err != nil {
		fmt.Fprintf(e.stderr, "warning: keeping the registration sockets: %v\n", err)
		return nil
	}
	if isStopped {
		if err := f.Chmod(stoppedMode); err != nil {
			return fmt.Errorf("cannot write the service manager's answer: %w", err)
		}
	}
	return nil
}

// removeIfStopped removes the registration sockets if the answer was yes.
func removeIfStopped(ctx context.Context, e *env, runDir string) error {
	// Before the answer: a daemon that starts after it has other sockets.
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
