package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"iter"
	"strings"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
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

func setupWait(fs *flag.FlagSet) runner {
	root := rootFlag(fs)
	timeout := fs.Duration("timeout", 0, "give up after `D`, such as 30s or 2m; 0 waits forever")
	return func(ctx context.Context, e *env, names []string) error {
		if *timeout < 0 {
			return usagef("--timeout %s is negative", *timeout)
		}
		if *timeout > 0 {
			limited, cancel := context.WithTimeoutCause(ctx, *timeout, fmt.Errorf("timed out after %s", *timeout))
			defer cancel()
			ctx = limited
		}
		return wait(ctx, e, *root, names)
	}
}

// interruption returns why ctx is done: the time that it was limited to, or a signal.
func interruption(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return errors.New("interrupted")
}

// wait returns when all named drivers, or all enabled ones, are registered. Named drivers can be
// configured, and the daemon started, later. Without names, a table that was never in force is an
// error: the drivers to wait for are not known.
func wait(ctx context.Context, e *env, root string, names []string) error {
	missing := []string{"the daemon has not answered"}
	for s, err := range follow(ctx, root) {
		if err != nil {
			missing = []string{err.Error()}
			if isPermanent(err) {
				return clientError(err)
			}
			continue
		}
		if missing = notRegistered(s, names); len(names) == 0 {
			if invalid := neverInForce(s); len(invalid) > 0 {
				return hinted(fmt.Errorf("the configuration has errors:\n  %s", strings.Join(invalid, "\n  ")), "csi-registrar config check shows all errors")
			}
			if unread := notRead(ctx, root, s); unread != "" {
				missing = []string{unread}
			} else if len(s.Drivers) == 0 {
				fmt.Fprintln(e.stderr, "warning: no driver is configured, so there is nothing to wait for")
			}
		}
		if len(missing) == 0 {
			return nil
		}
	}
	return hinted(fmt.Errorf("%w:\n  %s", interruption(ctx), strings.Join(missing, "\n  ")),
		"csi-registrar doctor finds out why a driver is not registered")
}

// neverInForce returns the tables and files that were never in force.
func neverInForce(s status.Document) (out []string) {
	for _, d := range s.Drivers {
		if d.State == status.Invalid {
			out = append(out, whyNot(d))
		}
	}
	for _, file := range s.InvalidFiles {
		out = append(out, file.String()+": invalid")
	}
	return out
}

// notRegistered returns the reason for each driver that is not registered yet.
func notRegistered(s status.Document, names []string) []string {
	var out []string
	if len(names) == 0 {
		for _, d := range s.Unserved() {
			out = append(out, whyNot(d))
		}
		return out
	}
	for _, name := range names {
		d, ok := s.Driver(name)
		switch {
		case !ok && s.ConfigError != "":
			out = append(out, name+": not configured; the configuration has errors: "+safetext.Clean(strings.ReplaceAll(s.ConfigError, "\n", "; "), maxLine))
		case !ok:
			out = append(out, name+": not configured")
		case !d.Served():
			out = append(out, whyNot(d))
		}
	}
	return out
}

func whyNot(d status.Driver) string {
	text := nameOf(d) + ": " + safetext.Clean(d.State, maxState)
	if d.Reason != "" && d.Reason != d.State {
		text += ": " + safetext.Clean(d.Reason, maxLine) // one line
	}
	return text
}
