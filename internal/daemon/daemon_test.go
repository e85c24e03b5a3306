package daemon

import (
	"context"
	"os"
	"syscall"
	"testing"
)

// By default, SIGHUP would end the process before its sockets are in the descriptor store.
func TestHangupWhileStopping(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	d := &daemon{}
	d.onHangup(ctx, func() {})
	stop()
	d.work.Wait()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}
