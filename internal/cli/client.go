package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"path/filepath"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/fswatch"
	"csi-registrar/internal/status"
	"csi-registrar/internal/worker"
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

// follow yields the current status document and then one for each change, across restarts of the
// daemon. While the daemon is down or does not answer, follow yields each distinct error once. It
// returns when ctx is done or after a permanent error. It never starts a stopped daemon.
func follow(ctx context.Context, root string) iter.Seq2[status.Document, error] {
	return func(yield func(status.Document, error) bool) {
		path, err := filepath.Abs(control.Path(root)) // the watcher takes absolute paths
		if err != nil {
			yield(status.Document{}, fmt.Errorf("cannot find the control socket: %w", err))
			return
		}
		// The watcher reports when the socket appears; without inotify it polls each second. Its
		// log messages are meant for a daemon.
		watcher := fswatch.New(slog.New(slog.DiscardHandler), worker.NewPool())
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- watcher.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		socket := watcher.Subscribe(path)
		defer socket.Close()

		client := control.NewClient(path)
		lastError := ""
		pause := time.Millisecond
		for {
			for s, err := range client.Watch(ctx) {
				switch {
				case err == nil:
					lastError, pause = "", time.Millisecond
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
			// The socket file appears before the daemon listens on it, and inotify does not report
			// listen: retry soon, then less often.
			select {
			case <-ctx.Done():
				return
			case <-socket.Hints():
				pause = time.Millisecond
			case <-time.After(pause):
				pause = min(2*pause, 2*time.Second)
			}
		}
	}
}
