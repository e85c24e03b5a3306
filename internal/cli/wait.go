package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"

	"csi-registrar/internal/status"
)

func setupWait(fs *flag.FlagSet) runner {
	root := rootFlag(fs)
	timeout := fs.Duration("timeout", 0, "give up after the time `D`, such as 30s or 2m; 0: never")
	return func(ctx context.Context, e *env, names []string) error {
		if err := driverArgs(names...); err != nil {
			return err
		}
		if *timeout < 0 {
			return usagef(nil, "--timeout %s is negative", *timeout)
		}
		return runWait(ctx, *root, *timeout, names)
	}
}

// runWait returns when all named drivers, or all enabled ones, are registered. A driver
// that is not configured yet and a daemon that does not run yet are waited for.
func runWait(ctx context.Context, root string, timeout time.Duration, names []string) error {
	waiting := ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	missing := []string{"the daemon has not answered"}
	for doc, err := range follow(waiting, root) {
		if err != nil {
			missing = []string{err.Error()}
			if lasting(err) {
				return asked(err)
			}
			continue
		}
		s, err := doc.Status()
		if err != nil {
			return err
		}
		if missing = notRegistered(s, names); len(missing) == 0 {
			return nil
		}
	}
	what := "interrupted"
	if errors.Is(waiting.Err(), context.DeadlineExceeded) {
		what = fmt.Sprintf("%s are over", timeout)
	}
	return hinted(fmt.Errorf("cannot wait any longer: %s\n  %s", what, strings.Join(missing, "\n  ")),
		"csi-registrar doctor finds out why a driver is not registered")
}

// notRegistered says of each driver that is still waited for why it is not registered.
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
			out = append(out, name+": not configured; the configuration has mistakes: "+strings.ReplaceAll(s.ConfigError, "\n", "; "))
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
		text += ": " + d.Reason
	}
	return text
}

func registered(d status.Driver) bool { return d.State == string(status.Registered) }
