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

// rootFlag declares --config-root, which every command that asks the daemon has.
func rootFlag(fs *flag.FlagSet) *string {
	return fs.String("config-root", "/", "take `DIR` for the root of /etc, /run and /usr/lib")
}

// asked gives an error of the control client its exit code and hint.
func asked(err error) error {
	switch {
	case errors.Is(err, control.ErrNotRunning):
		return &exitError{code: exitNotRunning, err: hinted(err, "start it with: systemctl start csi-registrar")}
	case errors.Is(err, fs.ErrPermission):
		return hinted(err, "only root may ask the daemon; try again with sudo")
	case errors.Is(err, control.ErrPathTooLong):
		return hinted(err, "name a shorter --config-root, for the daemon as well")
	}
	return err
}

// follow yields the status document as it is and at each change, across restarts of the
// daemon: when it ends, does not run or does not answer, that error comes once, and
// documents again when it is back. It ends when ctx is done, or after an error for which
// lasting is true: waiting will not mend it. Nothing it does starts a stopped daemon.
func follow(ctx context.Context, root string) iter.Seq2[control.Document, error] {
	return func(yield func(control.Document, error) bool) {
		path, err := filepath.Abs(control.Path(root)) // the watcher takes absolute paths
		if err != nil {
			yield(nil, fmt.Errorf("cannot find the control socket: %w", err))
			return
		}
		// The socket's appearance is waited for by the file system's notifications. The
		// watcher's own log is for a daemon; without notifications it polls each second.
		watcher := fswatch.New(slog.New(slog.DiscardHandler), fswatch.Options{})
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- watcher.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		seen := watcher.Subscribe(path)
		defer seen.Close()

		client := control.NewClient(path)
		told := ""
		pause := time.Millisecond
		for {
			for doc, err := range client.Watch(ctx) {
				switch {
				case err == nil:
					told, pause = "", time.Millisecond
					if !yield(doc, nil) {
						return
					}
				case err.Error() != told:
					told = err.Error()
					if !yield(nil, err) || lasting(err) {
						return
					}
				}
			}
			// A socket file comes before somebody listens on it, and that second moment
			// nobody tells: look again soon, then ever more slowly.
			select {
			case <-ctx.Done():
				return
			case <-seen.Hints():
				pause = time.Millisecond
			case <-time.After(pause):
				pause = min(2*pause, 2*time.Second)
			}
		}
	}
}

// lasting tells that waiting will not mend the error.
func lasting(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, control.ErrPathTooLong)
}
