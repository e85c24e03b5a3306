package cli

import (
	"context"
	"flag"
	"fmt"
	"time"

	"csi-registrar/internal/sockdiag"
)

// drainPause is the time between two checks: the kernel does not report when another process closes
// a connection. A check takes less than a millisecond.
const drainPause = 50 * time.Millisecond

func setupDrain(fs *flag.FlagSet) runner {
	socket := fs.String("socket", "", "the `PATH` of the driver's socket")
	timeout := fs.Duration("timeout", 0, "give up after the time `D`, such as 30s or 2m; 0: never")
	return func(ctx context.Context, _ *env, _ []string) error {
		switch {
		case *socket == "":
			return usagef("--socket is missing")
		case *timeout < 0:
			return usagef("--timeout %s is negative", *timeout)
		}
		ctx, cancel := withTimeout(ctx, *timeout)
		defer cancel()
		return drain(ctx, *socket)
	}
}

// drain returns when no connection to the socket is open.
func drain(ctx context.Context, socket string) error {
	for {
		open, err := sockdiag.Connections(socket)
		if err != nil || open == 0 {
			return err
		}
		select {
		case <-time.After(drainPause):
		case <-ctx.Done():
			return hinted(fmt.Errorf("%w: %d connections to %s are open", interruption(ctx), open, socket),
				"calls that are still running end with the driver; the kubelet retries them")
		}
	}
}
