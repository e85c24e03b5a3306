package daemon

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

// reportStatus keeps the line that `systemctl status` shows up to date, at most five times a
// second. systemd keeps the last line of a stopped service, which is "stopped".
func (d *daemon) reportStatus(ctx context.Context) {
	if d.notifier == nil {
		return
	}
	var last string
	for {
		changed := d.agent.Changed()
		if line := statusLine(d.agent.Status()); line != last {
			d.note("notify the service manager", d.notifier.Status(line))
			last = line
		}
		select {
		case <-ctx.Done():
		case <-changed:
			rate.Pause(ctx, 200*time.Millisecond)
		}
		if ctx.Err() != nil {
			d.note("notify the service manager", d.notifier.Status("stopped"))
			return
		}
	}
}

// statusLine formats the status in one line: "3 drivers: 2 registered, 1 absent (first
// nfs.csi.k8s.io)". Every user can read it, so it has no reasons: they quote drivers, whose answers
// may contain credentials.
func statusLine(s status.Document) string {
	count := map[string]int{}
	for _, d := range s.Drivers {
		count[d.State]++
	}
	var parts []string
	for state, n := range count {
		parts = append(parts, fmt.Sprintf("%d %s", n, state))
	}
	slices.SortFunc(parts, func(a, b string) int { return cmp.Compare(b, a) })
	line := fmt.Sprintf("%d drivers", len(s.Drivers))
	if len(s.Drivers) == 1 {
		line = "1 driver"
	}
	if len(parts) > 0 {
		line += ": " + strings.Join(parts, ", ")
	}
	if pending := s.Pending(); len(pending) > 0 {
		line += fmt.Sprintf(" (first %s)", pending[0].Name)
	}
	if ended := s.Kubelet.EndedAt; !ended.IsZero() {
		line += fmt.Sprintf("; %s ended at %s", s.Kubelet, ended.UTC().Format(time.TimeOnly+" MST"))
	}
	if down := s.Down(); len(down) > 0 {
		line += fmt.Sprintf("; %d registered and not serving (%s: driver %s)", len(down), down[0].Name, down[0].Driver)
	}
	if first, _, _ := strings.Cut(s.ConfigError, "\n"); first != "" {
		line = "the configuration has errors and is only partly in force: " + first + "; " + line
	}
	return line
}

// feedWatchdog reports to the manager that the daemon is alive, but only while the agent and every
// registrar answer, which does not depend on the drivers.
func (d *daemon) feedWatchdog(ctx context.Context) {
	interval, err := sdnotify.SdWatchdogEnabled(false)
	if d.note("read the watchdog's interval", err); interval == 0 {
		return
	}
	for ok := true; ok; ok = rate.Pause(ctx, interval/2) {
		if err := d.alive(ctx, interval/3); err != nil {
			d.note("feed the watchdog", err)
		} else {
			d.note("feed the watchdog", d.notifier.Watchdog())
		}
	}
}

func (d *daemon) alive(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return d.agent.Alive(ctx)
}
