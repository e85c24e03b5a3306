package doctor

import (
	"context"
	"errors"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

// plugin is a socket in plugins_registry with its answer to GetInfo.
type plugin struct {
	pluginreg.Info
	path string
	// of the process that called listen; another process answers if systemd kept the socket
	cred unixsock.Cred
	made time.Time // zero: not known
	err  error     // why it did not answer
}

// getInfo calls GetInfo on a registration socket, as the kubelet does.
func (x *diagnosis) getInfo(ctx context.Context, path string) (plugin, error) {
	return look(ctx, x, path, func() (p plugin, err error) {
		if at, statErr := os.Stat(path); statErr == nil {
			p.made = at.ModTime()
		}
		ctx, cancel := context.WithTimeout(ctx, socketTimeout)
		defer cancel()
		p.Info, p.cred, err = pluginreg.GetInfo(ctx, path)
		return p, err
	})
}

// plugins calls GetInfo on all sockets that the kubelet finds, and returns those of CSI drivers,
// by driver.
func (x *diagnosis) plugins(ctx context.Context) map[string][]plugin {
	out := map[string][]plugin{}
	// An error is reported when the directory is checked.
	paths, _ := look(ctx, x, x.registry(), func() ([]string, error) { return pluginreg.Sockets(x.registry()) })
	for _, p := range each(paths, func(path string) plugin {
		p, err := x.getInfo(ctx, path)
		p.path, p.err = path, err
		return p
	}) {
		// bind comes before listen
		if errors.Is(p.err, syscall.ECONNREFUSED) && time.Since(p.made).Abs() > kubeletRound {
			x.stale = append(x.stale, p)
		}
		if p.Type == registerapi.CSIPlugin {
			out[p.Name] = append(out[p.Name], p)
		}
	}
	return out
}

// staleSockets reports sockets in plugins_registry that nobody serves and that belong to none of
// the configured drivers: the kubelet never stops trying to connect to them.
func (x *diagnosis) staleSockets(ctx context.Context) {
	for _, p := range x.stale {
		name, ours := rootdir.DriverName(path.Base(p.path))
		if d, _ := x.config.Config.Driver(name); ours && d.Enabled && path.Dir(p.path) == x.registry() {
			continue // it is checked with its driver
		}
		fix := x.remove(ctx, p.path, unixsock.File{})
		if k := x.kubelet; k != nil && (x.runsFor(k.pid) == 0 || x.runsFor(k.pid) > time.Since(p.made)) {
			fix = []Fix{note("start the program that made it: if the kubelet has that driver, it forgets it when the file is removed"), optional(fix[len(fix)-1])}
		}
		x.finding("", "registrars", "plugin-socket-stale", "nobody listens on "+safetext.Word(p.path)+", so the kubelet cannot register its driver",
			"its program runs, or has removed it", fix...)
	}
}

// conflicts reports sockets that serve the driver and are not ours.
func (x *diagnosis) conflicts(ctx context.Context, d config.Driver, own string, ours bool) {
	var whose []string
	var fix []Fix
	st, _ := x.daemon.Driver(d.Name)
	for _, p := range x.served[d.Name] {
		who, known := x.process(ctx, p.cred.PID)
		// systemd can keep our socket for a daemon that does not run, or that cannot use it.
		foreign := st.Registration == status.Conflict || known && p.cred.PID > 1 && !strings.HasPrefix(who.comm, "csi-registrar")
		switch {
		case p.path == own && (ours || !foreign):
		case known:
			whose = append(whose, safetext.Word(p.path)+", served by "+who.String())
			fix = append(fix, x.stopRegistrar(ctx, who)...)
		default:
			whose = append(whose, safetext.Word(p.path))
			fix = append(fix, stopListener, run("ss", "-xlp", "src", p.path))
		}
	}
	if len(whose) == 0 {
		return
	}
	x.finding(d.Name, "registrars", "another-registrar", "another registrar serves this driver: "+strings.Join(whose[:min(len(whose), 5)], "; "),
		"only csi-registrar serves it: the kubelet refuses a second registrar, and deregisters the driver when either of them ends",
		append(fix, note("or let the other one register it: set enabled = false in the table of the driver"))...)
}

// stopListener explains a command that names an unknown program.
var stopListener = note("stop the program that this command names")

// stopRegistrar stops another registrar of a driver.
func (x *diagnosis) stopRegistrar(ctx context.Context, who process) []Fix {
	switch s := x.serverOf(ctx, "", who); {
	case s.pod != "" || who.inPod:
		return append(s.log(), note("remove that container from the DaemonSet of the driver, csi-registrar import lists what else to change"))
	case who.pid > 1:
		return []Fix{who.stop()}
	}
	return []Fix{note("stop that registrar, whose process is not visible")}
}
