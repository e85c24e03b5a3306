package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
)

// daemon is the status document of the running daemon.
type daemon struct {
	err error // why it could not be asked; nil if it answered
	status.Document
}

func (d daemon) runs() bool { return d.err == nil }

// asRoot runs doctor again as root.
var asRoot = run("sudo", "csi-registrar", "doctor")

const daemonTimeout = 2500 * time.Millisecond // it answers at once; less than fileTimeout

func (x *diagnosis) askDaemon(ctx context.Context) daemon {
	socket := control.Path(x.o.Source.Root)
	doc, err := look(ctx, x, socket, func() (status.Document, error) {
		ctx, cancel := context.WithTimeout(ctx, daemonTimeout)
		defer cancel()
		return control.NewClient(socket).Status(ctx)
	})
	return daemon{err, doc}
}

// running checks that the daemon runs, and that it has loaded the files as they are now.
func (x *diagnosis) running() {
	err, outdated := x.daemon.err, x.outdated()
	switch {
	case errors.Is(err, control.ErrNotRunning) && x.problemIn(StepUnit):
		x.checked("", StepDaemon, Problem, "%v", err)
	case errors.Is(err, control.ErrNotRunning):
		start := enable
		if x.properties["ActiveState"] == "active" { // its socket is gone
			start = systemctl("restart", serviceUnit)
		}
		x.problem("", StepDaemon, DaemonNotRunning, err.Error(), "it runs", start)
	case errors.Is(err, fs.ErrPermission):
		x.warning("", StepDaemon, NotRoot, err.Error(), "doctor runs as root; other users cannot see everything that it checks", asRoot)
	case err != nil:
		x.problem("", StepDaemon, DaemonNotAnswering, "the daemon does not answer: "+safetext.Quote(err.Error()),
			"it answers at once", logOf(serviceUnit), systemctl("restart", serviceUnit))
	case outdated != "":
		x.problem("", StepDaemon, ConfigurationNotLoaded, "the configuration of the daemon differs from the files: "+outdated,
			"the daemon has read the files", reload)
	default:
		x.checked("", StepDaemon, OK, "running since %s", x.daemon.StartedAt.Format(time.DateTime))
	}
}

// outdated returns how the daemon's configuration differs from the files; empty if it does not, or
// the files have errors, which are reported elsewhere.
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
		if why := x.differs(d); why != "" && x.selected(d.Name) {
			return d.Name + " " + why
		}
	}
	return ""
}

// differs returns how the daemon's settings of a driver differ from the files; empty if they do
// not.
func (x *diagnosis) differs(d config.Driver) string {
	st, known := x.daemon.Driver(d.Name)
	announced, _ := x.config.Config.Kubelet.Announced(d)
	switch {
	case !known && d.Enabled:
		return "is not known to the daemon"
	case !known:
		return ""
	case d.Enabled && st.State == status.Disabled:
		return "is disabled in the daemon"
	case st.Socket != d.Socket || st.Endpoint != announced:
		return fmt.Sprintf("has the socket %s and the endpoint %s in the daemon", safetext.Word(st.Socket), safetext.Word(st.Endpoint))
	}
	return ""
}

// degraded reports problems of the daemon that no finding of a driver explains.
func (x *diagnosis) degraded(ctx context.Context) {
	if x.daemon.Polling != "" {
		x.warning("", StepDaemon, ChangesPolled, "the daemon polls for changes every second: "+safetext.Quote(x.daemon.Polling),
			"the kernel reports them through inotify",
			note("find out which of these limits is reached, and raise it"), run("sysctl", "fs.inotify.max_user_instances", "fs.inotify.max_user_watches"),
			systemctl("restart", serviceUnit))
	}
	for _, s := range x.daemon.Stuck {
		if slices.ContainsFunc(x.report.Findings, func(f Finding) bool { return strings.Contains(f.Found, safetext.Word(s.Path)) }) {
			continue
		}
		where, fix := x.unmount(ctx, s.Path)
		x.warning("", StepDaemon, FileSystemNotAnswering,
			fmt.Sprintf("a call of the daemon to the file system of %s has not returned since %s%s", safetext.Word(s.Path), s.Since.Local().Format(time.DateTime), where),
			"every file system on the path of a driver answers", fix...)
	}
}
