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
)

// rootFlag declares --config-root, for the commands that connect to the daemon.
func rootFlag(fs *flag.FlagSet) *string {
	return fs.String("config-root", "/", "use `DIR` as the root of /etc, /run and /usr/lib")
}

// clientError gives an error of the control client its exit code and hint.
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

// isPermanent reports whether waiting does not help against the error.
func isPermanent(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, control.ErrPathTooLong)
}

// follow yields the status document as it is and at each change, across restarts of the
// daemon: when it ends, is not running or does not answer, that error comes once, and
// documents again when it is back. It ends when ctx is done, or after an error that is
// permanent. Nothing it does starts a stopped daemon.
func follow(ctx context.Context, root string) iter.Seq2[control.Document, error] {
	return func(yield func(control.Document, error) bool) {
		path, err := filepath.Abs(control.Path(root)) // the watcher takes absolute paths
		if err != nil {
			yield(nil, fmt.Errorf("cannot find the control socket: %w", err))
			return
		}
		// The watcher reports when the socket appears. Its own log is for a daemon; without
		// inotify it looks each second.
		watcher := fswatch.New(slog.New(slog.DiscardHandler), fswatch.Options{})
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
			for doc, err := range client.Watch(ctx) {
				switch {
				case err == nil:
					lastError, pause = "", time.Millisecond
					if !yield(doc, nil) {
						return
					}
				case err.Error() != lastError:
					lastError = err.Error()
					if !yield(nil, err) || isPermanent(err) {
						return
					}
				}
			}
			// A socket file appears before somebody listens on it, which is not notified:
			// retry soon, then less often.
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
