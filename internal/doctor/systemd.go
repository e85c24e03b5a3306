package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/safetext"
)

// Units asks the service manager.
type Units interface {
	// Show gives properties of a unit by name, as `systemctl show` prints them. A
	// property that comes several times has its values on lines of their own. The error
	// is ErrNoSystemd where none runs.
	Show(ctx context.Context, unit string, properties ...string) (map[string]string, error)
}

// ErrNoSystemd says that this machine is not run by systemd.
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
	if ctx.Err() != nil {
		return nil, errors.New("systemctl does not answer")
	}
	if errors.Is(err, exec.ErrNotFound) {
		return nil, ErrNoSystemd
	}
	if x, ok := errors.AsType[*exec.ExitError](err); ok {
		if strings.Contains(string(x.Stderr), "not been booted with systemd") {
			return nil, ErrNoSystemd
		}
		return nil, fmt.Errorf("systemctl: %s", strings.TrimSpace(string(x.Stderr)))
	}
	if err != nil {
		return nil, err
	}
	props := make(map[string]string, len(properties))
	for line := range strings.Lines(string(out)) {
		key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !ok {
			continue
		}
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

// service is what systemd says of the daemon's unit.
type service struct {
	properties map[string]string
	err        error
}

func (x *exam) askUnit(ctx context.Context) service {
	if x.o.Units == nil {
		return service{err: ErrNoSystemd}
	}
	p, err := x.o.Units.Show(ctx, serviceUnit, "LoadState", "LoadError", "ActiveState", "SubState", "Result", "UnitFileState",
		"NeedDaemonReload", "FileDescriptorStoreMax", "WatchdogUSec", "ExecStart", "ProtectSystem", "ReadWritePaths", "ProtectHome", "PrivateTmp", "NRestarts")
	return service{p, err}
}

// unit looks at how systemd runs the daemon.
func (x *exam) unit(ctx context.Context) {
	p, err := x.service.properties, x.service.err
	if errors.Is(err, ErrNoSystemd) {
		x.checked("", StepUnit, Skipped, "%v", err)
		return
	}
	if err != nil {
		x.found(Finding{Step: StepUnit, Severity: Warning, Found: "systemd cannot be asked: " + safetext.Quote(err.Error())})
		return
	}
	enable, restart, start := run("systemctl", "enable", "--now", serviceUnit), run("systemctl", "restart", serviceUnit), run("systemctl", "start", serviceUnit)
	f := Finding{Step: StepUnit, Severity: Problem, explains: true, Expected: "it runs"}
	stopped := p["LoadState"] == "not-found" || slices.Contains([]string{"inactive", "deactivating"}, p["ActiveState"])
	switch {
	case p["LoadState"] == "masked":
		f.Found, f.Expected = serviceUnit+" is masked, so that nothing can start it", "it is enabled and runs"
		f.Fix = []Fix{run("systemctl", "unmask", serviceUnit), enable}
	case stopped && x.daemon.runs():
		x.checked("", StepUnit, Skipped, "the daemon runs, but not by %s", serviceUnit)
		return
	case p["LoadState"] == "not-found":
		f.Found = "there is no " + serviceUnit
		f.Expected = "the package csi-registrar is installed, or its units are below /etc/systemd/system"
		f.Fix = []Fix{text("install the package csi-registrar"), enable}
	case p["LoadState"] != "loaded":
		f.Found = fmt.Sprintf("%s cannot be loaded (%s): %s", serviceUnit, p["LoadState"], safetext.Quote(p["LoadError"]))
		f.Expected = "systemd understands it"
		f.Fix = []Fix{run("systemd-analyze", "verify", serviceUnit), run("systemctl", "revert", serviceUnit), restart}
	case p["ActiveState"] == "failed":
		f.Found = fmt.Sprintf("%s has failed (%s)", serviceUnit, p["Result"])
		f.Fix = []Fix{logOf(serviceUnit), run("systemctl", "reset-failed", serviceUnit), start}
	case stopped:
		f.Found = fmt.Sprintf("%s is %s", serviceUnit, p["ActiveState"])
		f.Fix = []Fix{enable}
	case p["SubState"] == "auto-restart" || p["ActiveState"] == "activating" && p["NRestarts"] != "0" && !x.daemon.runs():
		f.Found = fmt.Sprintf("%s ends again and again (%s restarts, last result: %s)", serviceUnit, p["NRestarts"], p["Result"])
		f.Expected = "it stays up"
		f.Fix = []Fix{logOf(serviceUnit)}
	}
	if f.Found != "" {
		x.found(f)
		return
	}
	x.checked("", StepUnit, OK, "%s is %s", serviceUnit, p["ActiveState"])
	x.enabled(p)
	x.sandbox(p)
	x.hiddenSockets(p)
	x.store(p)
	x.openHTTP(ctx, p)
}

// asShipped undoes what was changed in a unit.
func asShipped(unit string) []Fix {
	return []Fix{run("systemctl", "revert", unit), run("systemctl", "restart", unit)}
}

// enabled warns of what the next boot, or the next start, would bring.
func (x *exam) enabled(p map[string]string) {
	if p["UnitFileState"] == "disabled" {
		x.found(Finding{Step: StepUnit, Severity: Warning,
			Found: serviceUnit + " runs, but is not enabled: after the next boot it does not", Expected: "it is enabled",
			Fix: []Fix{run("systemctl", "enable", serviceUnit)}})
	}
	if p["NeedDaemonReload"] == "yes" {
		x.found(Finding{Step: StepUnit, Severity: Warning,
			Found: "the files of " + serviceUnit + " have changed since systemd read them", Expected: "systemd has read them",
			Fix: reloadUnits()})
	}
}

// sandbox finds out whether the daemon may write below the kubelet's root directory.
func (x *exam) sandbox(p map[string]string) {
	root := x.config.Config.Kubelet.RootDir
	shown := safetext.Word(root)
	dir, setting := hider(root)
	hidden := hides(p[setting])
	if p["ProtectSystem"] != "strict" && !hidden {
		x.checked("", StepSandbox, OK, "the file system is not read-only for the daemon")
		return
	}
	for _, w := range strings.Fields(p["ReadWritePaths"]) {
		if !hidden && within(root, strings.Trim(strings.TrimLeft(w, "-+"), `"`)) {
			x.checked("", StepSandbox, OK, "the daemon may write below %s", shown)
			return
		}
	}
	f := Finding{Step: StepSandbox, Severity: Problem, explains: true,
		Found:    fmt.Sprintf("%s sees %s read-only: its ReadWritePaths= are %s", serviceUnit, shown, safetext.Quote(p["ReadWritePaths"])),
		Expected: "ReadWritePaths= has the kubelet's root directory",
		Fix:      installUnitDropIn(root)}
	if hidden {
		f.Found = fmt.Sprintf("%s does not see %s: it has an empty %s of its own (%s=%s)", serviceUnit, shown, dir, setting, p[setting])
		f.Expected = setting + "=no, and ReadWritePaths= has the kubelet's root directory"
	}
	if x.problemIn(StepKubelet) { // that is the wrong directory anyway
		x.checked("", StepSandbox, Failed, "%s", f.Found)
		return
	}
	x.found(f)
}

// hiddenSockets finds sockets of drivers in directories of which the daemon has its own.
func (x *exam) hiddenSockets(p map[string]string) {
	_, fixed := hider(x.config.Config.Kubelet.RootDir) // by what sandbox advises
	for _, d := range x.config.Config.Drivers {
		dir, setting := hider(d.Socket)
		if !d.Enabled || !x.wanted(d.Name) || !hides(p[setting]) || setting == fixed {
			continue
		}
		x.found(Finding{Driver: d.Name, Step: StepSandbox, Severity: Problem, explains: true,
			Found: fmt.Sprintf("the socket %s is in %s, of which the daemon has an empty one of its own (%s=%s)",
				safetext.Word(d.Socket), dir, setting, p[setting]),
			Expected: "the driver's socket is in a directory of its own below /run or /var/lib",
			Fix: append([]Fix{text("move the driver's socket, or let the daemon see that directory:")},
				writeDropIn(path.Join(path.Dir(unitDropInFile), strings.ToLower(setting)+".conf"), "[Service]", setting+"=no")...)})
	}
}

// store looks at what keeps registrations over a restart of the daemon.
func (x *exam) store(p map[string]string) {
	enabled := 0
	for _, d := range x.config.Config.Drivers {
		if d.Enabled {
			enabled++
		}
	}
	places, err := strconv.Atoi(p["FileDescriptorStoreMax"])
	f := Finding{Step: StepStore, Severity: Problem, Fix: asShipped(serviceUnit)}
	switch {
	case err != nil: // an older systemctl that does not show it
		x.checked("", StepStore, Skipped, "systemd does not show its size")
	case places == 0:
		f.Found = "FileDescriptorStoreMax= is 0: at each restart of csi-registrar the kubelet loses all drivers for a moment"
		f.Expected = "FileDescriptorStoreMax= as shipped"
	case places < enabled:
		f.Found = fmt.Sprintf("FileDescriptorStoreMax= is %d, for %d drivers: at each restart of csi-registrar the kubelet loses the others for a moment", places, enabled)
		f.Expected = "FileDescriptorStoreMax= as shipped, or as many as there are drivers"
	case !slices.Contains(strings.Fields(p["ExecStart"]), "--keep-sockets"):
		f.Found = "the daemon is started without --keep-sockets: at each restart the kubelet loses all drivers for a moment"
		f.Expected = "ExecStart= has --keep-sockets, as shipped"
	default:
		x.checked("", StepStore, OK, "%s", count(places, "place"))
	}
	if f.Found != "" {
		x.found(f)
	}
	if w := p["WatchdogUSec"]; w != "0" && w != "infinity" {
		x.checked("", StepWatchdog, OK, "%s", w)
		return
	}
	x.found(Finding{Step: StepWatchdog, Severity: Warning, Fix: asShipped(serviceUnit),
		Found: "systemd does not watch the daemon: WatchdogSec= is off", Expected: "it is on, as shipped"})
}

var endpointFlag = regexp.MustCompile(`--?http-endpoint[= ]([^ ;]+)`)

// openHTTP warns if health and metrics can be read from other machines.
func (x *exam) openHTTP(ctx context.Context, service map[string]string) {
	var sockets int
	var open []string
	add := func(address string) {
		if sockets++; !onLoopback(address) {
			open = append(open, safetext.Word(address))
		}
	}
	f := Finding{Step: StepHTTP, Severity: Warning, Expected: "127.0.0.1:9809, unless a firewall or your network takes care of it"}
	if m := endpointFlag.FindStringSubmatch(service["ExecStart"]); m != nil {
		add(m[1])
		f.Fix = []Fix{run("systemctl", "edit", serviceUnit)}
	}
	p, err := x.o.Units.Show(ctx, httpUnit, "ActiveState", "Listen")
	if err == nil && p["ActiveState"] == "active" {
		for line := range strings.Lines(p["Listen"]) {
			address, _, _ := strings.Cut(strings.TrimSpace(line), " ")
			add(address)
		}
		f.Fix = asShipped(httpUnit)
	}
	if len(open) == 0 {
		x.checked("", StepHTTP, OK, "%s, none open beyond this machine", count(sockets, "TCP socket"))
		return
	}
	f.Found = "health and metrics are served on " + strings.Join(open, ", ") + ", which other machines can reach"
	x.found(f)
}

// onLoopback reports whether a TCP address, or the path of a Unix socket, is only for this machine.
func onLoopback(address string) bool {
	if strings.HasPrefix(address, "/") || strings.HasPrefix(address, "@") {
		return true
	}
	host, _, ok := cutPort(address)
	if !ok {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// cutPort takes the port off an address; systemd writes IPv6 in brackets too.
func cutPort(address string) (host, port string, ok bool) {
	i := strings.LastIndexByte(address, ':')
	if i < 0 {
		return "", "", false
	}
	return strings.Trim(address[:i], "[]"), address[i+1:], true
}
