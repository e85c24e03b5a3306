package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/sys/safetext"
)

func setupReload(fs *flag.FlagSet) runner {
	force := fs.Bool("force", false, "withdraw also drivers without a table whose volumes are in use")
	root := rootFlag(fs)
	return func(ctx context.Context, e *env, _ []string) error {
		notes, err := control.NewClient(control.Path(*root)).Reload(ctx, *force)
		for _, note := range notes {
			fmt.Fprintf(e.stderr, "note: %s\n", safetext.Clean(note, maxLine))
		}
		if failed, ok := errors.AsType[*control.Error](err); ok {
			return fmt.Errorf("cannot reload the configuration; the previous one stays in force:\n  %s",
				strings.ReplaceAll(strings.TrimSpace(failed.Text), "\n", "\n  "))
		}
		return clientError(err)
	}
}

func setupReregister(fs *flag.FlagSet) runner {
	force := fs.Bool("force", false, "do it even if the kubelet would refuse what the driver reports now")
	root := rootFlag(fs)
	return func(ctx context.Context, _ *env, args []string) error {
		if len(args) == 0 {
			return usagef("name one driver")
		}
		err := control.NewClient(control.Path(*root)).Reregister(ctx, args[0], *force)
		if failed, ok := errors.AsType[*control.Error](err); ok && failed.NotFound() {
			return hinted(err, "csi-registrar status lists the drivers")
		}
		return clientError(err)
	}
}
