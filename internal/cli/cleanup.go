package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"

	"csi-registrar/internal/daemon"
	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/systemd"
)

func setupCleanup(fs *flag.FlagSet) runner {
	ifStopped := fs.Bool("if-stopped", false, "only if the service manager is stopping the unit that this process is part of; required")
	unit := fs.String("unit", "", "only if `UNIT` is down and not to be started, instead")
	root := fs.String("config-root", "/", "the `DIR` below which the daemon's run folder is")
	return func(ctx context.Context, e *env, args []string) error {
		if err := noArgs(args); err != nil {
			return err
		}
		if !*ifStopped {
			return usagef(nil, "--if-stopped is missing; without it nothing is cleaned up")
		}
		stopped := isStopping
		if *unit != "" {
			// A stop came in the middle of a restart, after the unit's own processes had been
			// told that it is one.
			stopped = func(ctx context.Context) (bool, error) { return systemd.Down(ctx, *unit) }
		}
		return runCleanup(ctx, e, daemon.RunDir(*root), stopped)
	}
}

// isStopping tells whether our unit has a stop job (a poweroff is one, too). With a restart
// job, and with none, as after a crash, the next process goes on with the sockets.
func isStopping(ctx context.Context) (bool, error) {
	job, err := systemd.Job(ctx, "")
	return job == systemd.JobStop, err
}

// runCleanup takes the registration sockets away if the daemon is gone for good. A dead
// socket that is left because nobody could be asked harms less than a registration lost:
// the next start sweeps it.
func runCleanup(ctx context.Context, e *env, runDir string, stopped func(context.Context) (bool, error)) error {
	// Before the question: a daemon that starts after the answer has other sockets.
	left, leftErr := kubelet.Recorded(runDir)
	isStopped, err := stopped(ctx)
	if err != nil {
		fmt.Fprintf(e.stderr, "warning: keeping the registration sockets: %v\n", err)
		return nil
	}
	if !isStopped {
		return nil
	}
	removed, err := left.Remove()
	for _, path := range removed {
		fmt.Fprintf(e.stdout, "removed %s\n", path)
	}
	if err := errors.Join(leftErr, err); err != nil {
		return fmt.Errorf("cannot take all registration sockets away: %w", err)
	}
	return nil
}
