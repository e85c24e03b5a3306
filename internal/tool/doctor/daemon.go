package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
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
func (x *diagnosis) running(ctx context.Context) {
	err, outdated := x.daemon.err, x.outdated()
	switch {
	case errors.Is(err, control.ErrNotRunning):
		start := enable
		if x.properties["ActiveState"] == "active" { // its socket is gone
			start = systemctl("restart", serviceUnit)
		}
		x.finding("", "daemon", "daemon-not-running", err.Error(), "it runs", start)
	case errors.Is(err, fs.ErrPermission):
		x.finding("", "daemon", "not-root", err.Error(), "doctor runs as root; other users cannot see everything that it checks", asRoot)
	case err != nil:
		set, fix := x.dropIns(ctx, serviceUnit)
		fix = slices.Concat([]Fix{logOf(serviceUnit)}, fix, []Fix{systemctl("restart", serviceUnit)})
		if few := x.setBy(ctx, serviceUnit, "LimitNOFILE"); few != "" {
			set, fix = few, override(serviceUnit, "Service", "LimitNOFILE")
		}
		x.finding("", "daemon", "daemon-not-answering", "the daemon does not answer: "+safetext.Quote(err.Error())+set, "it answers at once", fix...)
	case outdated != "":
		x.finding("", "daemon", "configuration-not-loaded", "the configuration of the daemon differs from the files: "+outdated,
			"the daemon, which is root without capabilities, has read the files", append(x.open(ctx), reload)...)
	case x.o.Version != "" && x.daemon.Version != x.o.Version:
		x.finding("", "daemon", "daemon-outdated", fmt.Sprintf("the daemon is version %s, this program %s", safetext.Word(x.daemon.Version), safetext.Word(x.o.Version)),
			"the daemon was restarted after the upgrade", systemctl("restart", serviceUnit))
	default:
		x.checked("", "daemon", OK, "running since %s", clock(x.daemon.StartedAt))
	}
}

// open makes the directories of the configuration readable for the daemon, which modes bind.
func (x *diagnosis) open(ctx context.Context) (fix []Fix) {
	for _, dir := range x.o.Source.Watch() {
		if at, err := x.stat(ctx, dir); err == nil && at.IsDir() && at.Mode&0o500 != 0o500 && x.rootOnly(ctx, dir) {
			fix = append(fix, run("chmod", "0755", dir))
		}
	}
	return fix
}

// clock formats a time in the zone of the output, which it names.
func clock(t time.Time) string { return t.Local().Format(time.DateTime + " MST") }

// outdated returns how the daemon's configuration differs from the files; empty if it does not, or
// the files have errors, which are reported elsewhere.
func (x *diagnosis) outdated() string {
	if x.daemon.err != nil || len(x.config.Errors) > 0 {
		return ""
	}
	if x.daemon.ConfigError != "" {
		return safetext.Quote(x.daemon.ConfigError)
	}
	if has := x.daemon.PluginsRegistry; has != "" && has.Checked(func(dir string) bool { return path.Clean(dir) == x.registry() }) == "" {
		return fmt.Sprintf("it publishes in %s, the files say %s", has, safetext.Word(x.registry()))
	}
	return ""
}

// doubleLimits doubles each limit of inotify that the daemon names as the reason why it polls.
func (x *diagnosis) doubleLimits(ctx context.Context) (fix []Fix) {
	for _, limit := range []string{"max_user_instances", "max_user_watches"} {
		if !strings.Contains(x.daemon.Polling, limit) {
			continue
		}
		file := filepath.Join(x.proc(), "sys/fs/inotify", limit)
		now, err := look(ctx, x, file, func() ([]byte, error) { return os.ReadFile(file) })
		value, invalid := strconv.Atoi(strings.TrimSpace(string(now)))
		if err != nil || invalid != nil {
			fix = append(fix, note("raise the sysctl fs.inotify.%s", limit))
			continue
		}
		conf := "/etc/sysctl.d/90-csi-registrar-" + limit + ".conf"
		fix = append(fix, write(conf, fmt.Sprintf("fs.inotify.%s = %d", limit, 2*value)), run("sysctl", "-p", conf))
	}
	return fix
}

// degraded reports problems of the daemon that no finding of a driver explains.
func (x *diagnosis) degraded(ctx context.Context) {
	if x.daemon.Polling != "" {
		x.finding("", "daemon", "changes-polled", "the daemon polls for changes every second: "+safetext.Quote(x.daemon.Polling),
			"the kernel reports them through inotify", append(x.doubleLimits(ctx), systemctl("restart", serviceUnit))...)
	}
	for _, s := range x.daemon.Stuck {
		if slices.ContainsFunc(x.report.Findings, func(f Finding) bool { return strings.Contains(f.Found, s.Path.String()) }) {
			continue
		}
		where, fix := "", []Fix{logOf(serviceUnit)}
		if path := s.Path.Checked(x.configured); path != "" {
			if dead := x.hanging(ctx, path); dead != "" {
				where, fix = x.unmount(ctx, dead)
			}
		}
		x.finding("", "daemon", "file-system-not-answering",
			fmt.Sprintf("a call of the daemon to the file system of %s has not returned since %s%s", s.Path, clock(s.Since), where),
			"every file system on the path of a driver answers", fix...)
	}
}

// configured reports whether a path is on the way to a path of the configuration, or below the
// kubelet's root directory.
func (x *diagnosis) configured(p string) bool {
	root := x.config.Config.Kubelet.RootDir
	return rootdir.Within(p, root) || rootdir.Within(root, p) || slices.ContainsFunc(x.config.Config.Drivers, func(d config.Driver) bool {
		return rootdir.Within(d.Socket, p) || rootdir.Within(d.Endpoint, p)
	})
}
