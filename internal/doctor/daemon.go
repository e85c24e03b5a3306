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

const daemonTimeout = 2500 * time.Millisecond // it answers at once; less than fileTimeout

func (x *exam) askDaemon(ctx context.Context) daemon {
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
func (x *exam) running() {
	err := x.daemon.err
	f := Finding{Step: StepDaemon, Severity: Problem, explains: true}
	switch {
	case errors.Is(err, control.ErrNotRunning):
		if x.problemIn(StepUnit) {
			x.checked("", StepDaemon, Failed, "%v", err)
			return
		}
		f.Found, f.Expected = err.Error(), "it runs"
		f.Fix = []Fix{run("systemctl", "enable", "--now", serviceUnit)}
	case errors.Is(err, fs.ErrPermission):
		f.Severity, f.explains = Warning, false
		f.Found, f.Expected = err.Error(), "doctor runs as root: much can only be seen then"
		f.Fix = []Fix{run("sudo", "csi-registrar", "doctor")}
	case err != nil:
		f.Found, f.Expected = "the daemon does not answer: "+safetext.Quote(err.Error()), "it answers at once"
		f.Fix = []Fix{logOf(serviceUnit), run("systemctl", "restart", serviceUnit)}
	default:
		f.Found, f.Expected = x.outdated(), "it has read them"
		if f.Found == "" {
			x.checked("", StepDaemon, OK, "running since %s", x.daemon.StartedAt.Format(time.DateTime))
			return
		}
		f.Found = "the daemon has another configuration than the files: " + f.Found
		f.Fix = []Fix{reload}
	}
	x.found(f)
}

// outdated says how the daemon's configuration differs from that of the files; empty if it
// does not. Where the files have errors it must, and they are reported already.
func (x *exam) outdated() string {
	if len(x.config.Errors) > 0 || x.problemIn(StepConfiguration) {
		return ""
	}
	if x.daemon.ConfigError != "" {
		return safetext.Quote(x.daemon.ConfigError)
	}
	if has := x.daemon.PluginsRegistry; has != "" && path.Clean(has) != x.registry() {
		return fmt.Sprintf("it publishes in %s, the files say %s", safetext.Word(has), safetext.Word(x.registry()))
	}
	for _, d := range x.config.Config.Drivers {
		if !x.wanted(d.Name) {
			continue
		}
		if why := x.differs(d); why != "" {
			return d.Name + " " + why
		}
	}
	return ""
}

func (x *exam) differs(d config.Driver) string {
	st, known := x.daemon.Driver(d.Name)
	switch {
	case !known && d.Enabled:
		return "is not known there"
	case !known:
		return ""
	case d.Enabled && st.State == status.Disabled:
		return "is disabled there"
	case st.Socket != d.Socket:
		return "has the socket " + safetext.Word(st.Socket) + " there"
	case st.Endpoint != d.Endpoint:
		return "has the endpoint " + safetext.Word(st.Endpoint) + " there"
	}
	return ""
}
