package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"csi-registrar/internal/core/sidecar"
	"csi-registrar/internal/daemon"
	"csi-registrar/internal/sys/worker"
)

func setupRun(fs *flag.FlagSet) runner {
	o, source := &daemon.Options{}, sourceFlags(fs)
	fs.StringVar(&o.HTTP, "http-endpoint", "", "also serve health and metrics on the TCP address `ADDR`")
	fs.BoolVar(&o.KeepSockets, "keep-sockets", false, "leave the registration sockets that are in the service manager's descriptor store in place when the daemon ends")
	peer := sidecar.Register(fs)
	return func(ctx context.Context, e *env, args []string) error {
		o.Version, o.Getenv, o.Stderr = build().Version, e.getenv, e.stderr
		e.stderr = briefly{e.stderr, worker.NewPool().Slot("standard error", nil)} // for report
		for _, path := range []*string{&source.Root, &source.File} {
			if *path == "" {
				continue
			}
			abs, err := filepath.Abs(*path) // the watcher takes absolute paths
			if err != nil {
				return err
			}
			*path = abs
		}
		o.Source = *source
		if !peer.HasAny() {
			if len(args) > 0 {
				return usagef("unexpected argument %q", args[0])
			}
			err := daemon.Run(ctx, *o)
			if errors.Is(err, daemon.ErrSandbox) || errors.Is(err, daemon.ErrRootDir) {
				return &exitError{exitSandbox, err, ""}
			}
			return err
		}
		flags, err := peer.Options(args)
		switch {
		case err != nil:
			return usagef("%w", err)
		case flags.ShowVersion:
			_, err := fmt.Fprintln(e.stdout, o.Version)
			return err
		case flags.Probe:
			return nil
		}
		return daemon.RunSidecar(ctx, *o, flags)
	}
}

// briefly gives up a Write after a second: the daemon's last message must not keep its process,
// which another one is to follow, from ending.
type briefly struct {
	w    io.Writer
	slot *worker.Slot
}

// Write implements io.Writer.
func (b briefly) Write(p []byte) (int, error) {
	text := bytes.Clone(p)
	return len(p), worker.Run(context.Background(), b.slot, time.Second, func() error {
		_, err := b.w.Write(text)
		return err
	})
}
