package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
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
// may contain credentials, or files.
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
	line := safetext.Count(len(s.Drivers), "driver")
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
	if s.ConfigError != "" {
		line = "the configuration has errors; " + line
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

// Names of descriptors: FileDescriptorName= of the socket units.
const (
	controlName = "control"
	httpName    = "http"
)

// descriptors are the descriptors that the service manager passed: its sockets, and the contents of
// the descriptor store. The previous process could store anything under any name, so a descriptor
// is used only if it matches its name. The others do not prevent a start, and are removed from the
// store with those of the same name that are used (regsocket.Socket.Adopt), or by forgetUnused.
type descriptors struct {
	control []net.Listener // Unix sockets at the path of the control socket
	http    []net.Listener // Unix or TCP sockets
	// by driver; several if a process died while it replaced one
	stored map[string][]*os.File
	// the names of all descriptors that can be in the store, each as often as it was passed
	held   []string
	unused []*os.File // all other descriptors
	reason error      // why the first of these is not used
}

// sortDescriptors takes over the files. control is the path of the control socket.
func sortDescriptors(files []*os.File, control string) *descriptors {
	d := &descriptors{stored: map[string][]*os.File{}}
	for _, f := range files {
		if err := d.add(f, control); err != nil {
			d.unused, d.reason = append(d.unused, f), cmp.Or(d.reason, err)
		}
	}
	return d
}

func (d *descriptors) add(f *os.File, control string) error {
	driver, isRegistration := strings.CutPrefix(f.Name(), regsocket.StorePrefix)
	if f.Name() != controlName && f.Name() != httpName {
		d.held = append(d.held, f.Name())
		if !isRegistration || csiname.CheckName(driver) != nil {
			return errors.New("the name is unknown")
		}
		d.stored[driver] = append(d.stored[driver], f)
		return nil
	}
	ln, err := systemd.Listener(f)
	if err != nil {
		return err
	}
	network, address := ln.Addr().Network(), ln.Addr().String()
	switch {
	case f.Name() == httpName && (network == "unix" || network == "tcp"):
		d.http = append(d.http, ln)
	case f.Name() == controlName && network == "unix" && address == control:
		d.control = append(d.control, ln)
	default:
		return errors.Join(fmt.Errorf("it listens on %s %q", network, address), ln.Close())
	}
	_ = f.Close() // ln is a copy
	return nil
}

// forgetUnused closes the unused descriptors and removes them from the descriptor store. It does
// not wait for the service manager: there can be thousands.
func (d *daemon) forgetUnused() {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for _, u := range d.handed.unused {
		d.note("close a descriptor", u.Close())
		d.note("remove a descriptor from the store", d.parts.store.Forget(done, u.Name()))
	}
	if unused := d.handed.unused; len(unused) > 0 {
		d.log.Warn("closed descriptors of the service manager that are not used",
			"count", len(unused), "first", unused[0].Name(), "reason", d.handed.reason)
	}
	d.handed.unused = nil
}
