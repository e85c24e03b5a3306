package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"
)

// stepTimeout limits a step. The longest one waits for two rounds of the kubelet, a second each.
const stepTimeout = 15 * time.Second

// endTimeout limits how long a child process may take to end.
const endTimeout = 5 * time.Second

// Demo has the programs to run and the output.
type Demo struct {
	Daemon string    // path of csi-registrar
	Driver string    // path of csi-sample-driver
	Out    io.Writer // lines of at most 80 columns
}

type step struct {
	title string
	run   func(*node, context.Context) error
}

// steps returns the steps in order. Each depends on those before it.
func steps() []step {
	return []step{
		{"The daemon starts before there is a driver", (*node).daemonStarts},
		{"The driver starts", (*node).driverStarts},
		{"The driver restarts", (*node).driverRestarts},
		{"The daemon is killed (kill -9) and comes back", (*node).daemonKilled},
		{"The administrator writes an invalid configuration file", (*node).configurationError},
		{"The driver stops", (*node).driverStops},
		{"The driver's configuration is removed", (*node).driverRemoved},
	}
}

// Run runs all steps and returns when its child processes have ended and its directory is removed.
// The error is that of the first step or of the first write to Out that failed, or the cause of
// ctx.
func (d Demo) Run(ctx context.Context) (err error) {
	// The kernel kills the children when the thread that started them ends (Pdeathsig), so that
	// none is left even after kill -9 of the demo. The thread must not end before them.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	d.Out = output{d.Out, stop}

	began := time.Now()
	n, err := newNode(ctx, d)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			err = errors.Join(err, n.showLog())
		}
		err = errors.Join(err, n.close())
	}()
	n.printIntroduction()
	for i, step := range steps() {
		fmt.Fprintf(d.Out, "\n%d. %s\n", i+1, step.title)
		late := fmt.Errorf("timed out after %s", stepTimeout)
		stepCtx, cancel := context.WithTimeoutCause(ctx, stepTimeout, late)
		err := step.run(n, stepCtx)
		cancel()
		if ctx.Err() != nil {
			return fmt.Errorf("cannot finish: %w", context.Cause(ctx))
		}
		if err != nil {
			return fmt.Errorf("step %d failed: %w", i+1, err)
		}
	}
	fmt.Fprintf(d.Out, "\nAll %d steps succeeded, in %.1f s.\n", len(steps()), time.Since(began).Seconds())
	return nil
}

// tempDir creates the demo's directory. Its path is short, because the path of a Unix socket has at
// most 107 bytes, and the longest one adds about 70 to it.
func tempDir() (string, error) {
	const most = 30
	base := os.TempDir()
	if len(base)+len("/csi-demo-4294967295") > most {
		base = "/tmp"
	}
	dir, err := os.MkdirTemp(base, "csi-demo-")
	if err != nil {
		return "", fmt.Errorf("cannot create a temporary directory: %w", err)
	}
	return dir, nil
}
