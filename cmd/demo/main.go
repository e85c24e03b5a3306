package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"csi-registrar/internal/demo"
)

func runDemo(ctx context.Context, e *env, args []string) error {
	if err := noArgs(args); err != nil {
		return err
	}
	// When nobody reads any more, a failed write ends the story. The signal would end the
	// process with its folder left behind.
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	defer signal.Stop(broken)
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("cannot find this program's own file: %w", err)
	}
	return demo.Story{Program: program, Out: e.stdout}.Run(ctx)
}
