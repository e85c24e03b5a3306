package cli

import (
	"context"
	"flag"
	"path/filepath"

	"csi-registrar/internal/compat"
	"csi-registrar/internal/config"
)

// runFlags is what `run` was told on its command line.
type runFlags struct {
	source      config.Source
	http        string
	keepSockets bool
}

// runDir is the daemon's folder: control socket, records, last good configuration.
func (f runFlags) runDir() string { return filepath.Join(f.source.Root, "run", "csi-registrar") }

func setupRun(fs *flag.FlagSet) runner {
	f := &runFlags{}
	fs.StringVar(&f.source.File, "config", "", "read `FILE` alone, instead of the files in /etc, /run and /usr/lib")
	fs.StringVar(&f.source.Root, "config-root", "/", "the `DIR` below which etc, run and usr/lib are")
	fs.StringVar(&f.http, "http-endpoint", "", "serve health and metrics at the TCP address `ADDR` as well")
	fs.BoolVar(&f.keepSockets, "keep-sockets", false, "leave what the service manager's descriptor store holds when the daemon ends")
	sidecar := compat.Register(fs)
	return func(ctx context.Context, e *env, args []string) error {
		for _, path := range []*string{&f.source.Root, &f.source.File} {
			if *path == "" {
				continue
			}
			abs, err := filepath.Abs(*path) // it is watched, too, and by then there may be another working directory
			if err != nil {
				return err
			}
			*path = abs
		}
		if sidecar.Wanted() {
			o, err := sidecar.Options(args)
			if err != nil {
				return usagef(nil, "%w", err)
			}
			return runSidecar(ctx, e, *f, o)
		}
		if err := noArgs(args); err != nil {
			return err
		}
		return runDaemon(ctx, e, *f)
	}
}
