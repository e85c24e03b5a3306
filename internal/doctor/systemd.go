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

// Show implements Units.
func (Systemctl) Show(ctx context.Context, unit string, properties ...string) (map[string]string, error) {
	out, err := exec.CommandContext(ctx, "systemctl", "show", "--no-pager", "--property="+strings.Join(properties, ","), "--", unit).Output()
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
		x.checked("", StepUnit, Skipped, err.Error())
		return
	}
	if err != nil {
		x.found(&Finding{Step: StepUnit, Severity: Warning, Is: "systemd cannot be asked: " + err.Error()})
		return
	}
	f := Finding{Step: StepUnit, Severity: Problem, explains: true}
	switch {
	case p["LoadState"] == "masked":
		f.Is = serviceUnit + " is masked, so that nothing can start it"
		f.Should = "it is enabled and runs"
		f.Fix = []string{"systemctl unmask " + serviceUnit, "systemctl enable --now " + serviceUnit}
	case p["LoadState"] == "not-found":
		if x.daemon.runs {
			x.checked("", StepUnit, Skipped, "the daemon runs, but not by "+serviceUnit)
			return
		}
		f.Is = "there is no " + serviceUnit
		f.Should = "the package csi-registrar is installed, or its units are below /etc/systemd/system"
		f.Fix = []string{"install the package csi-registrar", "systemctl enable --now " + serviceUnit}
	case p["LoadState"] != "loaded":
		f.Is = fmt.Sprintf("%s cannot be loaded (%s): %s", serviceUnit, p["LoadState"], p["LoadError"])
		f.Should = "systemd understands it"
		f.Fix = []string{"systemd-analyze verify " + serviceUnit, "systemctl revert " + serviceUnit, "systemctl restart " + serviceUnit}
	case p["ActiveState"] == "failed":
		f.Is = fmt.Sprintf("%s has failed (%s)", serviceUnit, p["Result"])
		f.Should = "it runs"
		f.Fix = []string{"journalctl -u " + serviceUnit + " -n 50", "systemctl reset-failed " + serviceUnit, "systemctl start " + serviceUnit}
	case p["ActiveState"] == "inactive" || p["ActiveState"] == "deactivating":
		if x.daemon.runs {
			x.checked("", StepUnit, Skipped, "the daemon runs, but not by "+serviceUnit)
			return
		}
		f.Is = fmt.Sprintf("%s is %s", serviceUnit, p["ActiveState"])
		f.Should = "it runs"
		f.Fix = []string{"systemctl enable --now " + serviceUnit}
	case p["SubState"] == "auto-restart" || p["ActiveState"] == "activating" && p["NRestarts"] != "0" && !x.daemon.runs:
		f.Is = fmt.Sprintf("%s ends again and again (%s restarts, last result: %s)", serviceUnit, p["NRestarts"], p["Result"])
		f.Should = "it stays up"
		f.Fix = []string{"journalctl -u " + serviceUnit + " -n 50"}
	}
	if f.Is != "" {
		x.found(&f)
		return
	}
	x.checked("", StepUnit, OK, fmt.Sprintf("%s is %s", serviceUnit, p["ActiveState"]))
	x.enabled(p)
	x.sandbox(p)
	x.hiddenSockets(p)
	x.store(p)
	x.openHTTP(ctx, p)
}

// enabled warns of what the next boot, or the next start, would bring.
func (x *exam) enabled(p map[string]string) {
	if p["UnitFileState"] == "disabled" {
		x.found(&Finding{Step: StepUnit, Severity: Warning,
			Is: serviceUnit + " runs, but is not enabled: after the next boot it does not", Should: "it is enabled",
			Fix: []string{"systemctl enable " + serviceUnit}})
	}
	if p["NeedDaemonReload"] == "yes" {
		x.found(&Finding{Step: StepUnit, Severity: Warning,
			Is: "the files of " + serviceUnit + " have changed since systemd read them", Should: "systemd has read them",
			Fix: []string{"systemctl daemon-reload", "systemctl restart " + serviceUnit}})
	}
}

// sandbox finds out whether the daemon may write below the kubelet's root directory.
func (x *exam) sandbox(p map[string]string) {
	root := x.config.Config.Kubelet.RootDir
	folder, setting := hider(root)
	hidden := hides(p[setting])
	if p["ProtectSystem"] != "strict" && !hidden {
		x.checked("", StepSandbox, OK, "the file system is not read-only for the daemon")
		return
	}
	for _, w := range strings.Fields(p["ReadWritePaths"]) {
		if !hidden && within(root, strings.Trim(strings.TrimLeft(w, "-+"), `"`)) {
			x.checked("", StepSandbox, OK, "the daemon may write below "+root)
			return
		}
	}
	f := Finding{Step: StepSandbox, Severity: Problem, explains: true,
		Is:     fmt.Sprintf("%s sees %s read-only: its ReadWritePaths= are %s", serviceUnit, root, p["ReadWritePaths"]),
		Should: "ReadWritePaths= has the kubelet's root directory",
		Fix:    installUnitDropIn(root)}
	if hidden {
		f.Is = fmt.Sprintf("%s does not see %s: it has an empty %s of its own (%s=%s)", serviceUnit, root, folder, setting, p[setting])
		f.Should = setting + "=no, and ReadWritePaths= has the kubelet's root directory"
	}
	if x.problemIn(StepKubelet) { // that is the wrong directory anyway
		x.checked("", StepSandbox, Failed, f.Is)
		return
	}
	x.found(&f)
}

// hiddenSockets finds sockets of drivers in folders of which the daemon has its own.
func (x *exam) hiddenSockets(p map[string]string) {
	_, mended := hider(x.config.Config.Kubelet.RootDir) // by what sandbox advises
	for _, d := range x.config.Config.Drivers {
		folder, setting := hider(d.Socket)
		if !d.Enabled || !x.wanted(d.Name) || !hides(p[setting]) || setting == mended {
			continue
		}
		x.found(&Finding{Driver: d.Name, Step: StepSandbox, Severity: Problem, explains: true,
			Is:     fmt.Sprintf("the socket %s is in %s, of which the daemon has an empty one of its own (%s=%s)", d.Socket, folder, setting, p[setting]),
			Should: "the driver's socket is in a folder of its own below /run or /var/lib",
			Fix: []string{"move the driver's socket, or let the daemon see that folder:",
				"mkdir -p " + path.Dir(unitDropInFile),
				fmt.Sprintf("printf '%%s\\n' '[Service]' %s=no > %s/%s.conf", setting, path.Dir(unitDropInFile), strings.ToLower(setting)),
				"systemctl daemon-reload", "systemctl restart " + serviceUnit}})
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
	switch {
	case err != nil: // an older systemctl that does not tell
		x.checked("", StepStore, Skipped, "systemd does not tell its size")
	case places > 0 && places < enabled:
		x.found(&Finding{Step: StepStore, Severity: Problem,
			Is:     fmt.Sprintf("FileDescriptorStoreMax= is %d, for %d drivers: at each restart of csi-registrar the kubelet loses the others for a moment", places, enabled),
			Should: "FileDescriptorStoreMax=4096, as shipped, or as many as there are drivers",
			Fix:    []string{"systemctl revert " + serviceUnit, "systemctl restart " + serviceUnit}})
	case places == 0:
		x.found(&Finding{Step: StepStore, Severity: Problem,
			Is:     "FileDescriptorStoreMax= is 0: at each restart of csi-registrar the kubelet loses all drivers for a moment",
			Should: "FileDescriptorStoreMax=4096, as shipped",
			Fix:    []string{"systemctl revert " + serviceUnit, "systemctl restart " + serviceUnit}})
	case !slices.Contains(strings.Fields(p["ExecStart"]), "--keep-sockets"):
		x.found(&Finding{Step: StepStore, Severity: Problem,
			Is:     "the daemon is started without --keep-sockets: at each restart the kubelet loses all drivers for a moment",
			Should: "ExecStart= has --keep-sockets, as shipped",
			Fix:    []string{"systemctl revert " + serviceUnit, "systemctl restart " + serviceUnit}})
	default:
		x.checked("", StepStore, OK, count(places, "place"))
	}
	switch w := p["WatchdogUSec"]; w {
	case "0", "infinity":
		x.found(&Finding{Step: StepWatchdog, Severity: Warning,
			Is: "systemd does not watch the daemon: WatchdogSec= is off", Should: "it is on, as shipped",
			Fix: []string{"systemctl revert " + serviceUnit, "systemctl restart " + serviceUnit}})
	default:
		x.checked("", StepWatchdog, OK, w)
	}
}

var endpointFlag = regexp.MustCompile(`--?http-endpoint[= ]([^ ;]+)`)

// openHTTP warns if health and metrics can be read from other machines.
func (x *exam) openHTTP(ctx context.Context, service map[string]string) {
	var sockets int
	var open []string
	look := func(address string) {
		if sockets++; !onLoopback(address) {
			open = append(open, address)
		}
	}
	f := Finding{Step: StepHTTP, Severity: Warning, Should: "127.0.0.1:9809, unless a firewall or your network takes care of it"}
	if m := endpointFlag.FindStringSubmatch(service["ExecStart"]); m != nil {
		look(m[1])
		f.Fix = []string{"systemctl edit " + serviceUnit}
	}
	p, err := x.o.Units.Show(ctx, httpUnit, "ActiveState", "Listen")
	if err == nil && p["ActiveState"] == "active" {
		for line := range strings.Lines(p["Listen"]) {
			address, _, _ := strings.Cut(strings.TrimSpace(line), " ")
			look(address)
		}
		f.Fix = []string{"systemctl revert " + httpUnit, "systemctl restart " + serviceUnit}
	}
	if len(open) == 0 {
		x.checked("", StepHTTP, OK, count(sockets, "TCP socket")+", none open beyond this machine")
		return
	}
	f.Is = "health and metrics are served on " + strings.Join(open, ", ") + ", which other machines can reach"
	x.found(&f)
}

// onLoopback tells whether a TCP address, or the path of a Unix socket, is only for this machine.
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
