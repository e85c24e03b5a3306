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

// stepTimeout bounds a step. The longest waits for two of the kubelet's seconds.
const stepTimeout = 15 * time.Second

// endTimeout bounds how long a child may take to end when it is told to.
const endTimeout = 5 * time.Second

// Demo is the whole demo.
type Demo struct {
	Daemon string    // path of csi-registrar
	Driver string    // path of csi-sample-driver
	Out    io.Writer // what people read, at most 80 columns wide
}

// step is a part of the story, with its heading.
type step struct {
	title string
	run   func(*node, context.Context) error
}

// steps returns the story in order. Each counts on those before it.
func steps() []step {
	return []step{
		{"The daemon starts before there is a driver", (*node).daemonStarts},
		{"The driver starts", (*node).driverStarts},
		{"The driver restarts", (*node).driverRestarts},
		{"The daemon is killed (kill -9) and comes back", (*node).daemonKilled},
		{"Somebody writes a wrong configuration file", (*node).configurationError},
		{"The driver goes away", (*node).driverGoes},
		{"The driver's configuration is removed", (*node).driverRemoved},
	}
}

// Run tells the story and returns when all processes that it started have ended and its
// directory is removed. The error is that of the first step that did not go as told; when
// ctx is done before the end, its cause; or that of the first write to Out that failed.
func (s Demo) Run(ctx context.Context) (err error) {
	// Children are killed when the thread that started them ends (Pdeathsig), so that
	// not even kill -9 of the demo leaves any behind. It has to live as long as they do.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	s.Out = output{s.Out, stop}

	began := time.Now()
	st, err := newNode(ctx, s)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			err = errors.Join(err, st.showLog())
		}
		err = errors.Join(err, st.close())
	}()
	st.printIntroduction()
	for i, step := range steps() {
		fmt.Fprintf(s.Out, "\n%d. %s\n", i+1, step.title)
		late := fmt.Errorf("it did not happen within %s", stepTimeout)
		stepCtx, cancel := context.WithTimeoutCause(ctx, stepTimeout, late)
		err := step.run(st, stepCtx)
		cancel()
		if ctx.Err() != nil {
			return fmt.Errorf("cannot tell the story to its end: %w", context.Cause(ctx))
		}
		if err != nil {
			return fmt.Errorf("step %d was not as told: %w", i+1, err)
		}
	}
	fmt.Fprintf(s.Out, "\nAll %d steps went as told, in %.1f s.\n", len(steps()), time.Since(began).Seconds())
	return nil
}

// temporary makes the story's directory: short, for the path of a Unix socket holds no more
// than 107 bytes, and the longest one adds some 70 to it.
func tempDir() (string, error) {
	const most = 30
	base := os.TempDir()
	if len(base)+len("/csi-demo-4294967295") > most {
		base = "/tmp"
	}
	dir, err := os.MkdirTemp(base, "csi-demo-")
	if err != nil {
		return "", fmt.Errorf("cannot make a temporary directory: %w", err)
	}
	return dir, nil
}
