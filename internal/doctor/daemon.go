package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// daemon is what the running daemon says of itself.
type daemon struct {
	err error // why it could not be asked; nil if it answered
	status.Document
}

func (d daemon) runs() bool { return d.err == nil }

// asRoot runs doctor as who may see everything.
var asRoot = run("sudo", "csi-registrar", "doctor")

const daemonTimeout = 2500 * time.Millisecond // it answers at once; less than fileTimeout

func (x *diagnosis) askDaemon(ctx context.Context) daemon {
	socket := control.Path(x.o.Source.Root)
	doc, err := look(ctx, x, socket, func() (status.Document, error) {
		ctx, cancel := context.WithTimeout(ctx, daemonTimeout)
		defer cancel()
		doc, err := control.NewClient(socket).Status(ctx)
		if err != nil {
			return status.Document{}, err
		}
		return doc.Status()
	})
	return daemon{err, doc}
}

// running looks whether the daemon runs, and works with the files as they are.
func (x *diagnosis) running() {
	err, outdated := x.daemon.err, x.outdated()
	switch {
	case errors.Is(err, control.ErrNotRunning) && x.problemIn(StepUnit):
		x.checked("", StepDaemon, Failed, "%v", err)
	case errors.Is(err, control.ErrNotRunning):
		x.problem("", StepDaemon, DaemonNotRunning, err.Error(), "it runs", enable)
	case errors.Is(err, fs.ErrPermission):
		x.warning("", StepDaemon, NotRoot, err.Error(), "doctor runs as root: much can only be seen then", asRoot)
	case err != nil:
		x.problem("", StepDaemon, DaemonNotAnswering, "the daemon does not answer: "+safetext.Quote(err.Error()),
			"it answers at once", logOf(serviceUnit), systemctl("restart", serviceUnit))
	case outdated != "":
		x.problem("", StepDaemon, ConfigurationNotLoaded, "the daemon has another configuration than the files: "+outdated,
			"it has read them", reload)
	default:
		x.checked("", StepDaemon, OK, "running since %s", x.daemon.StartedAt.Format(time.DateTime))
	}
}

// outdated says how the daemon's configuration differs from that of the files; empty if it
// does not. Where the files have errors it must, and they are reported already.
func (x *diagnosis) outdated() string {
	if x.daemon.err != nil || len(x.config.Errors) > 0 || x.problemIn(StepConfiguration) {
		return ""
	}
	if x.daemon.ConfigError != "" {
		return safetext.Quote(x.daemon.ConfigError)
	}
	if has := x.daemon.PluginsRegistry; has != "" && path.Clean(has) != x.registry() {
		return fmt.Sprintf("it publishes in %s, the files say %s", safetext.Word(has), safetext.Word(x.registry()))
	}
	for _, d := range x.config.Config.Drivers {
		if why := x.differs(d); why != "" && x.wanted(d.Name) {
			return d.Name + " " + why
		}
	}
	return ""
}

// differs says how the daemon's driver differs from that of the files; empty if it does not.
func (x *diagnosis) differs(d config.Driver) string {
	st, known := x.daemon.Driver(d.Name)
	told, _ := x.config.Config.Kubelet.Announced(d)
	switch {
	case !known && d.Enabled:
		return "is not known there"
	case !known:
		return ""
	case d.Enabled && st.State == status.Disabled:
		return "is disabled there"
	case st.Socket != d.Socket || st.Endpoint != told:
		return fmt.Sprintf("has the socket %s and the endpoint %s there", safetext.Word(st.Socket), safetext.Word(st.Endpoint))
	}
	return ""
}
