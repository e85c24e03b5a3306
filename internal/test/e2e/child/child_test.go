package child

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// A program outlives the thread of the goroutine that called Start.
func TestStartFromAThreadThatEnds(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	type result struct {
		thread int
		ended  <-chan struct{}
		err    error
	}
	started := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ended, err := Start(cmd, syscall.SIGKILL)
		started <- result{syscall.Gettid(), ended, err}
	}()
	r := <-started
	if r.err != nil {
		t.Fatal(r.err)
	}
	for os.Getpid() != r.thread { // which lives on as a zombie if it is the first
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", r.thread)); os.IsNotExist(err) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := io.WriteString(in, "alive\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "alive\n" {
		t.Errorf("read %q, %v", line, err)
	}
	in.Close()
	<-r.ended
	if !cmd.ProcessState.Success() {
		t.Errorf("cat ended: %s", cmd.ProcessState)
	}
}

func TestStartOfWhatIsNotThere(t *testing.T) {
	ended, err := Start(exec.Command("/nowhere/program"), syscall.SIGKILL)
	if !os.IsNotExist(err) {
		t.Errorf("error is %v", err)
	}
	<-ended
}
