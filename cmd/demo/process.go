package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// process is a child of the story.
type process struct {
	what string
	cmd  *exec.Cmd
	done chan struct{} // closed when it was waited for
	err  error         // of Wait; to be read after done
}

// start starts a child in a process group of its own: Ctrl-C on a terminal is for the
// demo, which then ends its children in order. To be called from the story's own thread.
func start(what string, cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot start the %s: %w", what, err)
	}
	p := &process{what: what, cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.err = cmd.Wait()
	}()
	return p, nil
}

// stop tells the process to end, and waits until it has, with exit code 0.
func (p *process) stop(ctx context.Context) error {
	if err := p.signal(ctx, syscall.SIGTERM); err != nil {
		return err
	}
	if p.err != nil {
		return fmt.Errorf("the %s did not end well: %w", p.what, p.err)
	}
	return nil
}

// kill is kill -9, waited for.
func (p *process) kill(ctx context.Context) error { return p.signal(ctx, syscall.SIGKILL) }

func (p *process) signal(ctx context.Context, s syscall.Signal) error {
	if p.ended() {
		return p.unexpectedEnd()
	}
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("cannot end the %s: %w", p.what, err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cannot end the %s: %w", p.what, context.Cause(ctx))
	}
}

// gone is the error that a process ended which should not have.
func (p *process) unexpectedEnd() error {
	return fmt.Errorf("the %s has ended by itself: %s", p.what, p.cmd.ProcessState)
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// end makes sure that nothing is left of the process, whatever state it is in.
func (p *process) end() error {
	if p == nil || p.ended() {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), endTimeout, errors.New("it takes too long"))
	defer cancel()
	if err := p.signal(ctx, syscall.SIGTERM); err == nil || p.ended() {
		return nil
	}
	ctx, cancel = context.WithTimeoutCause(context.Background(), endTimeout, errors.New("not even kill -9 ends it"))
	defer cancel()
	return p.kill(ctx)
}

// milliseconds since a moment, as people read them.
func milliseconds(d time.Duration) float64 {
	return float64(d.Round(100*time.Microsecond)) / float64(time.Millisecond)
}
