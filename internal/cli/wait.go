package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

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
