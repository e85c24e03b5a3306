package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
)

func setupWait(fs *flag.FlagSet) runner {
	root := rootFlag(fs)
	timeout := fs.Duration("timeout", 0, "give up after `D`, such as 30s or 2m; 0 waits forever")
	return func(ctx context.Context, e *env, names []string) error {
		if err := driverArgs(names...); err != nil {
			return err
		}
		if *timeout < 0 {
			return usagef("--timeout %s is negative", *timeout)
		}
		ctx, cancel := withTimeout(ctx, *timeout)
		defer cancel()
		return wait(ctx, *root, names)
	}
}

// withTimeout limits ctx to a time, if that is not 0.
func withTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("timed out after %s", timeout))
}

// interruption returns why ctx is done: the time that it was limited to, or a signal.
func interruption(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return errors.New("interrupted")
}

// wait returns when all named drivers, or all enabled ones, are registered. The drivers may be
// configured, and the daemon started, later.
func wait(ctx context.Context, root string, names []string) error {
	missing := []string{"the daemon has not answered"}
	for s, err := range follow(ctx, root) {
		if err != nil {
			missing = []string{err.Error()}
			if isPermanent(err) {
				return clientError(err)
			}
			continue
		}
		if missing = notRegistered(s, names); len(missing) == 0 {
			return nil
		}
	}
	return hinted(fmt.Errorf("%w:\n  %s", interruption(ctx), strings.Join(missing, "\n  ")),
		"csi-registrar doctor finds out why a driver is not registered")
}

// notRegistered returns the reason for each driver that is not registered yet.
func notRegistered(s status.Document, names []string) []string {
	var out []string
	if len(names) == 0 {
		for _, d := range s.Pending() {
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
		case !registered(d):
			out = append(out, whyNot(d))
		}
	}
	return out
}

func whyNot(d status.Driver) string {
	text := nameOf(d) + ": " + d.State
	if d.Reason != "" && d.Reason != d.State {
		text += ": " + safetext.Clean(d.Reason, maxLine) // one line
	}
	return text
}

func registered(d status.Driver) bool { return d.State == string(status.Registered) }
