// Command demo shows how a driver is registered, on any Linux machine, without a cluster or root.
// It runs the sample driver and the daemon, simulates the kubelet and the descriptor store of
// systemd, and checks the result of each step.
//
//	demo [DIR]
//
// DIR has the programs csi-registrar and csi-sample-driver, built by scripts/build. Default: bin.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	// After `| head -1` a failed write ends the demo. The signal would end the process before it
	// removes its directory.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	dir := "bin"
	switch len(args) {
	case 0:
	case 1:
		dir = args[0]
	default:
		return errors.New("usage: demo [DIR]")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	return Demo{Daemon: filepath.Join(dir, "csi-registrar"), Driver: filepath.Join(dir, "csi-sample-driver"), Out: out}.Run(ctx)
}
