package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"

	"csi-registrar/internal/tool/importer"
	"csi-registrar/internal/daemon"
)

func setupRun(fs *flag.FlagSet) runner {
	o, source := &daemon.Options{}, sourceFlags(fs)
	fs.StringVar(&o.HTTP, "http-endpoint", "", "also serve health and metrics on the TCP address `ADDR`")
	fs.BoolVar(&o.KeepSockets, "keep-sockets", false, "leave the registration sockets that are in the service manager's descriptor store in place when the daemon ends")
	sidecar := compat.Register(fs)
	return func(ctx context.Context, e *env, args []string) error {
		o.Version, o.Getenv, o.Stderr = build().Version, e.getenv, e.stderr
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
		if !sidecar.HasAny() {
			if len(args) > 0 {
				return usagef("unexpected argument %q", args[0])
			}
			err := daemon.Run(ctx, *o)
			if errors.Is(err, daemon.ErrSandbox) {
				return &exitError{exitSandbox, err, ""}
			}
			return err
		}
		flags, err := sidecar.Options(args)
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
