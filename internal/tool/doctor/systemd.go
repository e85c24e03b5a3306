package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
)

// Units queries the service manager.
type Units interface {
	// Show returns properties of a unit by name, as `systemctl show` prints them. Several values
	// of a property are separated by line breaks. The error is ErrNoSystemd if systemd does not
	// run.
	Show(ctx context.Context, unit string, properties ...string) (map[string]string, error)
	// Journal returns lines of a unit since the boot; none without a journal.
	Journal(ctx context.Context, unit string, args ...string) []string
}

// ErrNoSystemd means that systemd does not run on this machine.
var ErrNoSystemd = errors.New("systemd does not run here")

// Systemctl is the Units of this machine.
type Systemctl struct{}

const (
	systemdTimeout = 5 * time.Second
	restartTime    = 2 * time.Second
)

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

// Journal implements Units. journalctl --unit= also has what root's programs log about a unit
// (OBJECT_PID=), and the daemon is one.
func (Systemctl) Journal(ctx context.Context, unit string, args ...string) []string {
	ctx, cancel := context.WithTimeout(ctx, systemdTimeout)
	defer cancel()
	options := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return !strings.HasPrefix(a, "-") })
	matches := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return strings.HasPrefix(a, "-") })
	cmd := exec.CommandContext(ctx, "journalctl", slices.Concat(options, []string{"--quiet", "--no-pager", "--boot", "--output=cat"},
		matches, []string{"_SYSTEMD_UNIT=" + unit, "+"}, matches, []string{"_PID=1", "UNIT=" + unit})...)
	cmd.WaitDelay = time.Second
	out, _ := cmd.Output() // without journald there is none
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

const (
	serviceUnit = "csi-registrar.service"
	httpUnit    = "csi-registrar-http.socket"
	controlUnit = "csi-registrar.socket"
)

// reinstall restores the files of the package.
var reinstall = run("sh", "-c", "apt-get install --reinstall csi-registrar || dnf reinstall csi-registrar")

// enable starts the daemon now and at each boot.
var enable = run("systemctl", "enable", "--now", serviceUnit)

// unitProperties are what doctor asks of a unit, once: many questions take long with many drivers.
var unitProperties = strings.Fields(`LoadState LoadError ActiveState SubState Result FreezerState UnitFileState NeedDaemonReload NRestarts
	InvocationID Job MainPID ExecMainCode ExecMainStatus ExecMainExitTimestamp FragmentPath DropInPaths EnvironmentFiles
	Type User ExecStart Listen Requires After WantedBy RequiredBy UpheldBy TriggeredBy
	FileDescriptorStoreMax WatchdogUSec ProtectSystem ReadWritePaths InaccessiblePaths ProtectHome PrivateTmp`)

// askUnit asks systemd about the daemon's unit.
func (x *diagnosis) askUnit(ctx context.Context) {
	x.properties, x.propertiesErr = x.o.Units.Show(ctx, serviceUnit, unitProperties...)
}

// awaitUnit gives a daemon that ends by itself, as after a change of root_dir, the time to be
// started again.
func (x *diagnosis) awaitUnit(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, restartTime)
	defer cancel()
	for slices.Contains([]string{"deactivating", "activating"}, x.properties["ActiveState"]) && rate.Pause(ctx, restartTime/10) {
		x.askUnit(context.WithoutCancel(ctx))
	}
}

// show returns the properties of a unit; nil if systemd does not answer, which was reported for the
// daemon's unit. It is not asked again then: each question takes its time limit.
func (x *diagnosis) show(ctx context.Context, unit string) map[string]string {
	if x.propertiesErr != nil || unit == "" {
		return nil
	}
	p, _ := memo(x, unit, func() (map[string]string, error) { return x.o.Units.Show(ctx, unit, unitProperties...) })
	return p
}

// elements splits a property that is a list. systemd (257) quotes elements with a backslash, as in
// the name of the slice of a template's instances.
func elements(property string) []string {
	list := strings.Fields(property)
	for i, e := range list {
		if plain, err := strconv.Unquote(e); err == nil && e[0] == '"' {
			list[i] = plain
		}
	}
	return list
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
		x.finding("", "unit", id, serviceUnit+" "+found, expected, fix...)
	}
	switch {
	case errors.Is(err, ErrNoSystemd):
		x.checked("", "unit", Skipped, "%v", err)
	case err != nil:
		x.finding("", "unit", "systemd-not-answering", "cannot query systemd: "+safetext.Quote(err.Error()), "")
	case p["LoadState"] == "masked":
		unmask := []Fix{systemctl("unmask", serviceUnit), enable}
		if p["UnitFileState"] == "masked-runtime" {
			unmask[0] = run("systemctl", "unmask", "--runtime", serviceUnit)
		}
		problem("unit-masked", "is masked, so that nothing can start it", "it is enabled and runs", unmask...)
	case stopped && x.daemon.runs():
		x.checked("", "unit", Skipped, "the daemon runs, but not as %s", serviceUnit)
	case p["LoadState"] == "not-found":
		problem("unit-missing", "does not exist", "the package csi-registrar is installed, or its units are below /etc/systemd/system",
			reinstall, enable)
	case p["LoadState"] != "loaded":
		why, fix := x.repair(ctx, p["LoadError"])
		problem("unit-not-loaded", fmt.Sprintf("cannot be loaded (%s)%s", p["LoadState"], why), "systemd understands it", fix...)
	case state == "failed":
		why, fix := x.repair(ctx, "")
		problem("unit-failed", "has failed ("+p["Result"]+")"+why, "it runs", append([]Fix{systemctl("reset-failed", serviceUnit)}, fix...)...)
	// Between two starts it is inactive, and NRestarts begins again with a start by another unit.
	case !x.daemon.runs() && (stopped && p["Result"] != "success" && p["Result"] != "" || p["SubState"] == "auto-restart" || state == "activating" && p["NRestarts"] != "0"):
		why, fix := x.repair(ctx, "")
		problem("unit-restarting", fmt.Sprintf("ends at each start (%s, status %s)%s", p["Result"], p["ExecMainStatus"], why), "it keeps running", fix...)
	case stopped:
		missing, fix := x.missingUnits(ctx, serviceUnit, p["Requires"])
		if x.show(ctx, httpUnit)["LoadState"] == "masked" {
			fix = append(fix, systemctl("unmask", httpUnit))
		}
		if x.lastError(ctx, serviceUnit, p) != "" { // an unmet condition, or requirement
			why, undo := x.repair(ctx, "")
			missing, fix = missing+why, append(fix, undo...)
		} else {
			set, undo := x.dropIns(ctx, serviceUnit)
			missing, fix = missing+set, append(fix, each(undo, optional)...)
		}
		problem("unit-stopped", "is "+state+missing, "it runs", append(fix, enable)...)
	default:
		x.checked("", "unit", OK, "%s is %s", serviceUnit, state)
		x.enabled(ctx, "", "unit", serviceUnit)
		if p["NeedDaemonReload"] == "yes" {
			x.finding("", "unit", "unit-changed", "the files of "+serviceUnit+" have changed since systemd read them",
				"systemd has read them", reloadUnits()...)
		}
		if user := p["User"]; user != "" && user != "root" {
			x.finding("", "unit", "root-dir-not-writable", serviceUnit+" runs as "+safetext.Word(user)+", who may not write below the kubelet's directory"+x.setBy(ctx, serviceUnit, "User"),
				"it runs as root", override(serviceUnit, "Service", "User")...)
		}
		x.sandbox(ctx, p)
		x.hiddenSockets(ctx, p)
		x.store(p)
		x.http(ctx)
	}
}

// enabled reports that a unit that runs will not start again. A system extension's target upholds
// units; the daemon's socket starts it only when somebody connects.
func (x *diagnosis) enabled(ctx context.Context, driver string, step Step, unit string) {
	p := x.show(ctx, unit)
	if p["LoadState"] == "bad-setting" || p["LoadState"] == "error" {
		set, undo := x.dropIns(ctx, unit)
		x.finding(driver, step, "unit-not-enabled", unit+" runs, but systemd refuses its files, and will not start it again: "+safetext.Quote(x.lastError(ctx, unit, p))+set,
			"systemd understands them", append([]Fix{run("systemd-analyze", "verify", unit)}, undo...)...)
		return
	}
	if missing, fix := x.missingUnits(ctx, unit, p["Requires"]); missing != "" {
		x.finding(driver, step, "unit-not-enabled", unit+" runs"+missing+", and it will not be started again", "it can be started", fix...)
	}
	state, starts := p["UnitFileState"], p["WantedBy"]+p["RequiredBy"]+p["UpheldBy"]
	if unit != serviceUnit {
		starts += p["TriggeredBy"]
	}
	if state == "enabled-runtime" || state == "disabled" && starts == "" {
		x.finding(driver, step, "unit-not-enabled", unit+" runs, but is not enabled ("+state+"): it will not start at the next boot",
			"it is enabled", systemctl("enable", unit))
	}
}

// store checks the descriptor store, which keeps registrations over a restart of the daemon, and
// the watchdog.
func (x *diagnosis) store(p map[string]string) {
	enabled := len(x.enabledDrivers())
	problem := func(id ID, found, loses, expected, directive string) {
		x.finding("", "descriptor store", id, found+": at each restart of csi-registrar the kubelet loses "+loses+" for a moment",
			expected+" as shipped", override(serviceUnit, "Service", directive)...)
	}
	switch places, err := strconv.Atoi(p["FileDescriptorStoreMax"]); {
	case err != nil: // an older systemctl does not show it
		x.checked("", "descriptor store", Skipped, "systemd does not show its size")
	case places < enabled || places == 0:
		problem("store-too-small", fmt.Sprintf("FileDescriptorStoreMax= is %d, for %s", places, safetext.Count(enabled, "driver")),
			"the others", "as many as there are drivers, or FileDescriptorStoreMax=", "FileDescriptorStoreMax")
	case !slices.Contains(strings.Fields(p["ExecStart"]), "--keep-sockets"):
		problem("sockets-not-kept", "the daemon is started without --keep-sockets", "all drivers", "ExecStart= has --keep-sockets,", "ExecStart")
	default:
		x.checked("", "descriptor store", OK, "%s", safetext.Count(places, "place"))
	}
	if w := p["WatchdogUSec"]; w != "0" && w != "infinity" {
		x.checked("", "watchdog", OK, "%s", w)
	} else {
		x.finding("", "watchdog", "watchdog-off", "systemd does not watch the daemon: WatchdogSec= is off",
			"it is on, as shipped", override(serviceUnit, "Service", "WatchdogSec")...)
	}
}

// http checks the socket for health and metrics. If it has failed, another process uses its port.
func (x *diagnosis) http(ctx context.Context) {
	unit := x.show(ctx, httpUnit)
	if unit["ActiveState"] != "failed" {
		x.checked("", "http", OK, "%s is %s", httpUnit, cmp.Or(unit["ActiveState"], "inactive"))
		return
	}
	address, _, _ := strings.Cut(unit["Listen"], " ")
	_, port, _ := net.SplitHostPort(address)
	who, fix := "", []Fix{logOf(httpUnit)}
	if p := x.holder(ctx, port); p.pid > 0 {
		who, fix = ": "+p.String()+" listens on its port", []Fix{note("if that program is not needed:"), optional(p.stop())}
	}
	fix = append(append(fix, note("otherwise on another port, which monitoring must be told")), writeDropIn("/etc/systemd/system/"+httpUnit+".d/zz-doctor-port.conf", "[Socket]", "ListenStream=", "ListenStream=127.0.0.1:9810")...)
	x.finding("", "http", "http-failed", fmt.Sprintf("%s, for health and metrics on %s, has failed%s", httpUnit, safetext.Word(address), who), "it listens", fix...)
}

// holder returns the process that listens on a TCP port; the zero process if there is none.
func (x *diagnosis) holder(ctx context.Context, port string) process {
	all, _ := x.processes(ctx)
	for _, p := range all {
		if p.pid > 1 && slices.Contains(x.listening(ctx, p.pid).ports, port) {
			return p
		}
	}
	return process{}
}
