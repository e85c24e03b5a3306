// Command demo tells the story of a registration on any Linux machine, without a cluster and
// without root: the sample driver, the daemon, a fake kubelet, and the descriptor store of
// systemd played by this process. It proves each step that it tells.
//
//	demo [DIR]
//
// DIR holds csi-registrar and csi-sample-driver as scripts/build makes them; bin by default.
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
	// When nobody reads any more, as after `| head -1`, a failed write ends the story. The
	// signal would end the process with its directory left behind.
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
