package cli

import (
	"context"
	"flag"
	"fmt"

	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/systemd"
)

func setupCleanup(fs *flag.FlagSet) runner {
	f := &runFlags{}
	ifStopped := fs.Bool("if-stopped", false, "only if the service manager is stopping the unit that this process is part of; required")
	fs.StringVar(&f.source.Root, "config-root", "/", "the `DIR` below which the daemon's run folder is")
	return func(ctx context.Context, e *env, args []string) error {
		if err := noArgs(args); err != nil {
			return err
		}
		if !*ifStopped {
			return usagef(nil, "--if-stopped is missing; without it nothing is cleaned up")
		}
		return runCleanup(ctx, e, f.runDir(), systemd.Job)
	}
}

// runCleanup takes the registration sockets away if the daemon is gone for good, which is
// when its unit has a stop job (a poweroff is one, too). With a restart job, and with none,
// as after a crash, the next process goes on with them. A dead socket that is left because
// nobody could be asked harms less than a registration lost: the next start sweeps it.
func runCleanup(ctx context.Context, e *env, runDir string, job func(ctx context.Context, unit string) (string, error)) error {
	jobType, err := job(ctx, "")
	if err != nil {
		fmt.Fprintf(e.stderr, "warning: keeping the registration sockets: %v\n", err)
		return nil
	}
	if jobType != systemd.JobStop {
		return nil
	}
	removed, err := kubelet.RemoveRecorded(runDir)
	for _, path := range removed {
		fmt.Fprintf(e.stdout, "removed %s\n", path)
	}
	if err != nil {
		return fmt.Errorf("cannot take all registration sockets away: %w", err)
	}
	return nil
}
