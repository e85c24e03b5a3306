package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// process is a child process.
type process struct {
	what string
	cmd  *exec.Cmd
	done chan struct{} // closed when Wait has returned
	err  error         // of Wait; read it after done
}

// start starts a child in its own process group, so that Ctrl-C reaches only the demo, which then
// ends its children in order. Call it only from the thread of Run.
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

// stop sends SIGTERM and waits for the end. The exit code must be 0.
func (p *process) stop(ctx context.Context) error {
	if err := p.signal(ctx, syscall.SIGTERM); err != nil {
		return err
	}
	if p.err != nil {
		return fmt.Errorf("the %s failed: %w", p.what, p.err)
	}
	return nil
}

// kill sends SIGKILL and waits for the end.
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

// unexpectedEnd returns the error for a process that ended by itself.
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

// end ends the process, whatever its state is. p may be nil.
func (p *process) end() error {
	if p == nil || p.ended() {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), endTimeout, errors.New("timed out"))
	defer cancel()
	if err := p.signal(ctx, syscall.SIGTERM); err == nil || p.ended() {
		return nil
	}
	ctx, cancel = context.WithTimeoutCause(context.Background(), endTimeout, errors.New("timed out after kill -9"))
	defer cancel()
	return p.kill(ctx)
}

// milliseconds converts a duration, rounded to a tenth.
func milliseconds(d time.Duration) float64 {
	return float64(d.Round(100*time.Microsecond)) / float64(time.Millisecond)
}
