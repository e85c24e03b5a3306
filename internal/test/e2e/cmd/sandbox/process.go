package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// process is a command that ran on a terminal of its own.
type process struct {
	output  string
	started []string // the command lines of all programs that it and its descendants executed
}

// endLimit is how long a process may take to end after SIGTERM.
const endLimit = 20 * time.Second

// run runs a command. After the time it gets SIGTERM.
func run(limit time.Duration, args ...string) (p process, err error) {
	master, slave, err := openPair()
	if err != nil {
		return p, err
	}
	var output bytes.Buffer
	var reader sync.WaitGroup
	reader.Go(func() { _, _ = io.Copy(&output, master) }) // ends with EIO
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	p.started, err = follow(cmd, limit)
	err = errors.Join(err, slave.Close())
	reader.Wait()
	p.output = strings.ReplaceAll(output.String(), "\r\n", "\n") // the terminal's own
	return p, errors.Join(err, master.Close())
}

func openPair() (master, slave *os.File, err error) {
	if master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		return nil, nil, err
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, nil, errors.Join(err, master.Close())
	}
	return master, slave, nil
}

// follow runs a command as its tracer, until all its descendants have ended.
func follow(cmd *exec.Cmd, limit time.Duration) (started []string, err error) {
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &unix.SysProcAttr{Ptrace: true, Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	first := cmd.Process.Pid
	defer time.AfterFunc(limit, func() { _ = unix.Kill(first, unix.SIGTERM) }).Stop()
	defer time.AfterFunc(limit+endLimit, func() { _ = unix.Kill(-first, unix.SIGKILL) }).Stop()
	const options = unix.PTRACE_O_TRACEEXEC | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_EXITKILL
	for attached := false; ; {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD:
			return started, nil
		case err != nil:
			return started, err
		case status.Signaled() && pid == first && status.Signal() == unix.SIGKILL:
			err = errors.New("it had to be killed")
			return started, err
		case !status.Stopped():
			continue
		}
		signal := status.StopSignal()
		switch {
		case !attached: // stopped after exec
			attached = true
			if err := unix.PtraceSetOptions(pid, options); err != nil {
				return started, err
			}
			started, signal = append(started, commandLine(pid)), 0
		case status.TrapCause() == unix.PTRACE_EVENT_EXEC:
			started, signal = append(started, commandLine(pid)), 0
		case signal == unix.SIGTRAP, signal == unix.SIGSTOP: // of ptrace
			signal = 0
		}
		if err := unix.PtraceCont(pid, int(signal)); err != nil && err != unix.ESRCH {
			return started, err
		}
	}
}

func commandLine(pid int) string {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " "))
}
