package cli

import (
	"context"
	"errors"
	"flag"
	"io/fs"
	"iter"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

// rootFlag declares --config-root for the commands that connect to the daemon.
func rootFlag(fs *flag.FlagSet) *string {
	return fs.String("config-root", "/", "use `DIR` as the root of /etc, /run and /usr/lib")
}

// clientError adds the exit code and the hint to an error of the control client.
func clientError(err error) error {
	switch {
	case errors.Is(err, control.ErrNotRunning):
		return &exitError{exitNotRunning, err, "start it with: systemctl start csi-registrar"}
	case errors.Is(err, fs.ErrPermission):
		return hinted(err, "only root may connect to the daemon; try again with sudo")
	case errors.Is(err, control.ErrPathTooLong):
		return hinted(err, "use a shorter --config-root, for the daemon as well")
	}
	return err
}

// isPermanent reports whether retrying cannot help.
func isPermanent(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, control.ErrPathTooLong)
}

// retryPause is the time between two attempts to connect to the daemon.
const retryPause = 200 * time.Millisecond

// follow yields the current status document and then one for each change, across restarts of the
// daemon. While the daemon is down or does not answer, follow yields each distinct error once. It
// returns when ctx is done or after a permanent error. It never starts a stopped daemon.
func follow(ctx context.Context, root string) iter.Seq2[status.Document, error] {
	return func(yield func(status.Document, error) bool) {
		client := control.NewClient(control.Path(root))
		lastError := ""
		for {
			for s, err := range client.Watch(ctx) {
				switch {
				case err == nil:
					lastError = ""
					if !yield(s, nil) {
						return
					}
				case err.Error() != lastError:
					lastError = err.Error()
					if !yield(status.Document{}, err) || isPermanent(err) {
						return
					}
				}
			}
			if !rate.Pause(ctx, retryPause) {
				return
			}
		}
	}
}
