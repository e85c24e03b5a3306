// Package child starts programs that end with the test process, however that ends.
package child

import (
	"os/exec"
	"runtime"
	"syscall"
)

// Start starts cmd in a process group of its own. The kernel sends it the signal sig when this
// process ends. ended is closed after cmd.Wait has returned; then cmd.ProcessState is valid.
//
// For the kernel, the parent has ended when the thread that started the program ends
// (PR_SET_PDEATHSIG in prctl(2)), and a thread ends with a goroutine that leaves it locked. So the
// program gets a thread that is kept until the program ends.
func Start(cmd *exec.Cmd, sig syscall.Signal) (ended <-chan struct{}, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: sig, Setpgid: true}
	started, done := make(chan error), make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // in ProcessState
		}
	}()
	return done, <-started
}
