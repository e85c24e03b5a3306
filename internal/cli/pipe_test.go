package cli

import (
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
)

// inAPipe starts this program with a pipe for its standard output, of which the test has
// the other end.
func inAPipe(t *testing.T, args ...string) (cmd *exec.Cmd, stdout io.ReadCloser) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd = exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	if stdout, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, stdout
}

// Nothing changes, and the reader has gone: `status --watch | head -1` ends.
func TestWatchUnread(t *testing.T) {
	leaks(t)
	root := newRoot(t)
	newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
	for _, args := range [][]string{{}, {"--json"}} {
		cmd, stdout := inAPipe(t, append([]string{"status", "--watch", "--config-root", root}, args...)...)
		if _, err := stdout.Read(make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
		if err := stdout.Close(); err != nil {
			t.Fatal(err)
		}
		late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v: %v", args, err)
		}
		late.Stop()
	}
}
