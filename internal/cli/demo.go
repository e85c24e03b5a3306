package cli

import (
	"context"
	"fmt"
	"os"

	"csi-registrar/internal/demo"
)

func runDemo(ctx context.Context, e *env, args []string) error {
	if err := noArgs(args); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("cannot find this program's own file: %w", err)
	}
	return demo.Story{Program: program, Out: e.stdout}.Run(ctx)
}
