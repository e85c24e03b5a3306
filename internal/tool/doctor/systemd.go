package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Units queries the service manager.
type Units interface {
	// Show returns properties of a unit by name, as `systemctl show` prints them. Several values
	// of a property are separated by line breaks. The error is ErrNoSystemd if systemd does not
	// run.
	Show(ctx context.Context, unit string, properties ...string) (map[string]string, error)
}

// ErrNoSystemd means that systemd does not run on this machine.
var ErrNoSystemd = errors.New("systemd does not run here")

// Systemctl is the Units of this machine.
type Systemctl struct{}

const systemdTimeout = 5 * time.Second

// Show implements Units.
func (Systemctl) Show(ctx context.Context, unit string, properties ...string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, systemdTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "systemctl", "show", "--no-pager", "--property="+strings.Join(properties, ","), "--", unit)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	x, failed := errors.AsType[*exec.ExitError](err)
	switch {
	case ctx.Err() != nil:
		return nil, errors.New("systemctl does not answer")
	case errors.Is(err, exec.ErrNotFound) || failed && strings.Contains(string(x.Stderr), "not been booted with systemd"):
		return nil, ErrNoSystemd
	case failed:
		return nil, fmt.Errorf("systemctl: %s", strings.TrimSpace(string(x.Stderr)))
	case err != nil:
		return nil, err
	}
	props := make(map[string]string, len(properties))
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if old, again := props[key]; again {
			value = old + "\n" + value
		}
		props[key] = value
	}
	return props, nil
}

const (
	serviceUnit = "csi-registrar.service"
	httpUnit    = "csi-registrar-http.socket"
)

// enable starts the daemon now and at each boot.
var enable = run("systemctl", "enable", "--now", serviceUnit)

// askUnit asks systemd about the daemon's unit.
func (x *diagnosis) askUnit(ctx context.Context) {
	x.properties, x.propertiesErr = x.o.Units.Show(ctx, serviceUnit, "LoadState", "LoadError", "ActiveState", "SubState", "Result", "UnitFileState",
		"NeedDaemonReload", "FileDescriptorStoreMax", "WatchdogUSec", "ExecStart", "ProtectSystem", "ReadWritePaths", "InaccessiblePaths", "ProtectHome", "PrivateTmp", "NRestarts")
}

// unit checks how systemd runs the daemon.
func (x *diagnosis) unit(ctx context.Context) {
	p, err := x.properties, x.propertiesErr
	state := p["ActiveState"]
	stopped := p["LoadState"] == "not-found" || state == "inactive" || state == "deactivating"
	problem := func(id ID, found, expected string, fix ...Fix) {
		if !x.daemon.runs() {
			found += x.stuckVolumes()
		}
		x.problem("", StepUnit, id, serviceUnit+" "+found, expected, fix...)
	}
	switch {
	case errors.Is(err, ErrNoSystemd):
		x.checked("", StepUnit, Skipped, "%v", err)
	case err != nil:
		x.warning("", StepUnit, SystemdNotAnswering, "cannot query systemd: "+safetext.Quote(err.Error()), "")
	case p["LoadState"] == "masked":
		problem(UnitMasked, "is masked, so that nothing can start it", "it is enabled and runs", systemctl("unmask", serviceUnit), enable)
	case stopped && x.daemon.runs():
		x.checked("", StepUnit, Skipped, "the daemon runs, but not as %s", serviceUnit)
	case p["LoadState"] == "not-found":
		problem(UnitMissing, "does not exist", "the package csi-registrar is installed, or its units are below /etc/systemd/system",
			note("install the package csi-registrar"), enable)
	case p["LoadState"] != "loaded":
		problem(UnitNotLoaded, fmt.Sprintf("cannot be loaded (%s): %s", p["LoadState"], safetext.Quote(p["LoadError"])), "systemd understands it",
			slices.Concat([]Fix{run("systemd-analyze", "verify", serviceUnit)}, x.noteDropIns(ctx), reloadUnits())...)
	case state == "failed":
		problem(UnitFailed, "has failed ("+p["Result"]+")", "it runs",
			logOf(serviceUnit), systemctl("reset-failed", serviceUnit), systemctl("start", serviceUnit))
	case stopped:
		problem(UnitStopped, "is "+state, "it runs", enable)
	case p["SubState"] == "auto-restart" || state == "activating" && p["NRestarts"] != "0" && !x.daemon.runs():
		problem(UnitRestarting, fmt.Sprintf("ends repeatedly (%s restarts, last result: %s)", p["NRestarts"], p["Result"]),
			"it keeps running", logOf(serviceUnit))
	default:
		x.checked("", StepUnit, OK, "%s is %s", serviceUnit, state)
		if p["UnitFileState"] == "disabled" {
			x.warning("", StepUnit, UnitNotEnabled, serviceUnit+" runs, but is not enabled: it will not start at the next boot",
				"it is enabled", systemctl("enable", serviceUnit))
		}
		if p["NeedDaemonReload"] == "yes" {
			x.warning("", StepUnit, UnitChanged, "the files of "+serviceUnit+" have changed since systemd read them",
				"systemd has read them", reloadUnits()...)
		}
		x.sandbox(p)
		x.hiddenSockets(p)
		x.store(ctx, p)
		x.openHTTP(ctx, p)
	}
}

// noteDropIns names the drop-ins of the daemon's unit.
func (x *diagnosis) noteDropIns(ctx context.Context) []Fix {
	fix := []Fix{note("correct the line that is named, in one of these files if it is a drop-in")}
	for _, file := range x.dropIns(ctx, serviceUnit) {
		fix = append(fix, note("%s", safetext.ShellWord(file)))
	}
	return fix
}

// store checks the descriptor store, which keeps registrations over a restart of the daemon, and
// the watchdog.
func (x *diagnosis) store(ctx context.Context, p map[string]string) {
	enabled := 0
	for _, d := range x.config.Config.Drivers {
		if d.Enabled {
			enabled++
		}
	}
	problem := func(id ID, found, loses, expected, directive string) {
		x.problem("", StepStore, id, found+": at each restart of csi-registrar the kubelet loses "+loses+" for a moment",
			expected+" as shipped", x.restore(ctx, serviceUnit, "Service", directive)...)
	}
	switch places, err := strconv.Atoi(p["FileDescriptorStoreMax"]); {
	case err != nil: // an older systemctl does not show it
		x.checked("", StepStore, Skipped, "systemd does not show its size")
	case places <= enabled: // one is for the kubelet's process
		problem(StoreTooSmall, fmt.Sprintf("FileDescriptorStoreMax= is %d, for %s and the process of the kubelet", places, count(enabled, "driver")),
			"the others", "one more than there are drivers, or FileDescriptorStoreMax=", "FileDescriptorStoreMax")
	case !slices.Contains(strings.Fields(p["ExecStart"]), "--keep-sockets"):
		problem(SocketsNotKept, "the daemon is started without --keep-sockets", "all drivers", "ExecStart= has --keep-sockets,", "ExecStart")
	default:
		x.checked("", StepStore, OK, "%s", count(places, "place"))
	}
	if w := p["WatchdogUSec"]; w != "0" && w != "infinity" {
		x.checked("", StepWatchdog, OK, "%s", w)
	} else {
		x.warning("", StepWatchdog, WatchdogOff, "systemd does not watch the daemon: WatchdogSec= is off",
			"it is on, as shipped", x.restore(ctx, serviceUnit, "Service", "WatchdogSec")...)
	}
}

// openHTTP warns if health and metrics can be read from other machines.
func (x *diagnosis) openHTTP(ctx context.Context, service map[string]string) {
	var addresses []string
	var fix []Fix
	endpointFlag := regexp.MustCompile(`--?http-endpoint[= ]([^ ;]+)`)
	if m := endpointFlag.FindStringSubmatch(service["ExecStart"]); m != nil {
		addresses, fix = m[1:], x.restore(ctx, serviceUnit, "Service", "ExecStart")
	}
	p, err := x.o.Units.Show(ctx, httpUnit, "ActiveState", "Listen")
	if err == nil && p["ActiveState"] == "active" {
		for line := range strings.Lines(p["Listen"]) {
			address, _, _ := strings.Cut(strings.TrimSpace(line), " ")
			addresses = append(addresses, address)
		}
		fix = x.restore(ctx, httpUnit, "Socket", "ListenStream")
	}
	var open []string
	for _, a := range addresses {
		if !onLoopback(a) {
			open = append(open, safetext.Word(a))
		}
	}
	if len(open) == 0 {
		x.checked("", StepHTTP, OK, "%s, none reachable from other machines", count(len(addresses), "TCP socket"))
		return
	}
	x.warning("", StepHTTP, HTTPOpen, "health and metrics are served on "+strings.Join(open, ", ")+", which other machines can reach",
		"127.0.0.1:9809, unless a firewall or your network restricts access", fix...)
}

// onLoopback reports whether an address is reachable only from this machine: a loopback address, or
// the path of a Unix socket.
func onLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip, _ := netip.ParseAddr(host) // the zero Addr is not a loopback address
	return strings.HasPrefix(address, "/") || strings.HasPrefix(address, "@") || err == nil && (host == "localhost" || ip.Unmap().IsLoopback())
}
