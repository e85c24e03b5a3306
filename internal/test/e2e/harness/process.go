package harness

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

func notify(c chan<- os.Signal, s ...os.Signal) { signal.Notify(c, s...) }

// process is a child process. It is always waited for.
type process struct {
	t      testing.TB
	what   string
	cmd    *exec.Cmd
	log    fake.Buffer
	exited chan struct{}
	err    error // of Wait; read after exited
}

func start(t testing.TB, what string, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, what: what, cmd: cmd, exited: make(chan struct{})}
	cmd.Stderr = &p.log
	if err := cmd.Start(); err != nil {
		t.Fatalf("cannot start %s: %v", what, err)
	}
	go func() {
		defer close(p.exited)
		p.err = cmd.Wait()
	}()
	t.Cleanup(func() {
		if p.running() {
			p.signal(syscall.SIGKILL)
		}
		<-p.exited
		if t.Failed() {
			t.Logf("---- log of %s\n%s", what, tail(p.log.String(), 300))
		}
	})
	return p
}

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimRight(s, "\n"), "\n")
	if len(all) > lines {
		all = append([]string{fmt.Sprintf("(%d lines before)", len(all)-lines)}, all[len(all)-lines:]...)
	}
	return strings.Join(all, "\n")
}

func (p *process) running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

func (p *process) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && p.running() {
		p.t.Errorf("cannot signal %s: %v", p.what, err)
	}
}

// end sends a signal, waits, and returns the exit code, or -1 if a signal ended the process.
func (p *process) end(s syscall.Signal, limit time.Duration) int {
	p.t.Helper()
	p.signal(s)
	return p.wait(limit)
}

func (p *process) wait(limit time.Duration) int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(limit):
		p.signal(syscall.SIGQUIT) // writes the goroutines to the log
		p.signal(syscall.SIGKILL)
		p.t.Fatalf("%s did not end within %v", p.what, limit)
	}
	return p.cmd.ProcessState.ExitCode()
}

// Process is a child process that ends with its test. Its log is shown if the test fails.
type Process struct{ *process }

// StartProcess starts a Process.
func StartProcess(t testing.TB, what string, cmd *exec.Cmd) *Process {
	t.Helper()
	return &Process{start(t, what, cmd)}
}

// Running reports whether the process runs.
func (p *Process) Running() bool { return p.running() }

// Log returns the standard error of the process so far.
func (p *Process) Log() string { return p.log.String() }

// Signal sends a signal to the process.
func (p *Process) Signal(s syscall.Signal) { p.signal(s) }

// End sends a signal, waits, and returns the exit code, or -1 if a signal ended the process.
func (p *Process) End(s syscall.Signal, limit time.Duration) int {
	p.t.Helper()
	return p.end(s, limit)
}
