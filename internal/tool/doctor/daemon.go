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
		found, start, path := err.Error(), []Fix{enable}, control.Path(x.o.Source.Root)
		switch listen := x.show(ctx, controlUnit)["Listen"]; {
		case listen != "" && !strings.HasPrefix(listen, path+" "):
			found, start = controlUnit+" listens on "+safetext.Word(listen)+x.setBy(ctx, controlUnit, "ListenStream"), override(controlUnit, "Socket", "ListenStream")
		case x.properties["ActiveState"] == "active":
			found, start = serviceUnit+" runs, but somebody removed "+safetext.Word(path), []Fix{systemctl("restart", serviceUnit)}
		}
		x.finding("", "daemon", "daemon-not-running", found, "it runs", start...)
	case errors.Is(err, fs.ErrPermission):
		x.finding("", "daemon", "not-root", err.Error(), "doctor runs as root; other users cannot see everything that it checks", asRoot)
	case err != nil:
		set, fix := x.dropIns(ctx, serviceUnit)
		fix = slices.Concat([]Fix{logOf(serviceUnit)}, fix, []Fix{systemctl("restart", serviceUnit)})
		if x.properties["FreezerState"] == "frozen" {
			set, fix = "; "+serviceUnit+" is frozen, by systemctl freeze", []Fix{systemctl("thaw", serviceUnit)}
		} else if few := x.setBy(ctx, serviceUnit, "LimitNOFILE"); few != "" {
			set, fix = few, override(serviceUnit, "Service", "LimitNOFILE")
		}
		x.finding("", "daemon", "daemon-not-answering", "the daemon does not answer: "+safetext.Quote(err.Error())+set, "it answers at once", fix...)
	case outdated != "":
		apply := []Fix{reload}
		if strings.Contains(x.daemon.ConfigError, giveUp.String()) {
			apply = []Fix{note("the next line gives up these volumes, without it the daemon follows when they are unmounted: drain the node before"), giveUp}
		}
		x.finding("", "daemon", "configuration-not-loaded", "the configuration of the daemon differs from the files: "+outdated,
			"the daemon, which is root without capabilities, has read the files", append(x.open(ctx), apply...)...)
	case x.o.Version != "" && x.daemon.Version != x.o.Version:
		x.finding("", "daemon", "daemon-outdated", fmt.Sprintf("the daemon is version %s, this program %s", safetext.Word(x.daemon.Version), safetext.Word(x.o.Version)),
			"the daemon was restarted after the upgrade", note("if dpkg was interrupted:"), optional(run("dpkg", "--configure", "csi-registrar")), systemctl("restart", serviceUnit))
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

// sandbox checks that the daemon may write below the kubelet's root directory.
func (x *diagnosis) sandbox(ctx context.Context, p map[string]string) {
	root := x.config.Config.Kubelet.RootDir
	shown := safetext.Word(root)
	dir, setting := rootdir.Hider(root)
	hidden := rootdir.Hides(p[setting])
	writable := p["ProtectSystem"] != "strict" || slices.ContainsFunc(strings.Fields(p["ReadWritePaths"]), func(w string) bool {
		return rootdir.Within(rootdir.PluginsRegistry(root), strings.Trim(strings.TrimLeft(w, "-+"), `"`))
	})
	found := fmt.Sprintf("%s sees the plugins_registry below %s read-only: its ReadWritePaths= are %s", serviceUnit, shown, safetext.Quote(p["ReadWritePaths"]))
	expected := "ReadWritePaths= has the plugins_registry below the kubelet's root directory"
	if hidden {
		found = fmt.Sprintf("%s does not see %s: it has its own empty %s (%s=%s)", serviceUnit, shown, dir, setting, p[setting])
		expected = setting + "=no, and " + expected
	}
	fix, set := installDropIn(root), x.setBy(ctx, serviceUnit, "ReadWritePaths")
	if unit, _ := rootdir.DropInLines(root); unit == "" && set != "" && !strings.Contains(set, rootdir.DropInFile) {
		found, fix = found+set, override(serviceUnit, "Service", "ReadWritePaths")
	}
	if above := hiddenAbove(p["InaccessiblePaths"], path.Clean(root)); above != "" {
		found = fmt.Sprintf("%s does not see %s: %s is hidden from it (InaccessiblePaths=)", serviceUnit, shown, safetext.Word(above))
		expected = "no InaccessiblePaths= above the kubelet's root directory: ReadWritePaths= cannot open what is below"
		fix = []Fix{note("give the kubelet a root directory elsewhere, or see nodes.md for how to open %s and what else is in it", safetext.ShellWord(above))}
		hidden = true
	}
	if writable && !hidden {
		x.checked("", "sandbox", OK, "the daemon may write below %s", shown)
	} else {
		x.finding("", "sandbox", "root-dir-not-writable", found, expected, fix...)
	}
}

// hiddenAbove returns a directory of a list of InaccessiblePaths= that contains a path, or "".
func hiddenAbove(list, p string) string {
	for _, word := range strings.Fields(list) {
		if dir := strings.TrimLeft(word, "-+"); rootdir.Within(p, dir) {
			return dir
		}
	}
	return ""
}

// hiddenSockets reports sockets of drivers in directories that the unit's sandbox hides or
// replaces, such as /tmp.
func (x *diagnosis) hiddenSockets(ctx context.Context, p map[string]string) {
	root := x.config.Config.Kubelet.RootDir
	_, fixed := rootdir.Hider(root) // by the fix of sandbox
	for _, d := range x.config.Config.Drivers {
		dir, setting := rootdir.Hider(d.Socket)
		above, shown := hiddenAbove(p["InaccessiblePaths"], d.Socket), "the socket "+safetext.Word(d.Socket)+" is in "
		switch {
		case !d.Enabled || !x.selected(d.Name):
		case above != "" && !rootdir.Within(root, above):
			set, fix := x.dropIns(ctx, serviceUnit)
			x.finding(d.Name, "sandbox", "driver-socket-hidden", shown+safetext.Word(above)+", which InaccessiblePaths= hides from the daemon"+set,
				"the daemon sees the socket", append(fix, systemctl("restart", serviceUnit))...)
		case rootdir.Hides(p[setting]) && setting != fixed:
			x.finding(d.Name, "sandbox", "driver-socket-hidden", fmt.Sprintf("%s%s, and the daemon has its own empty %[2]s (%s=%s)", shown, dir, setting, p[setting]),
				"the driver's socket is in its own directory below /run or /var/lib", append([]Fix{note("or move the driver's socket, and leave the sandbox as it is")},
					writeDropIn(path.Join(path.Dir(rootdir.DropInFile), strings.ToLower(setting)+".conf"), "[Service]", setting+"=no")...)...)
		}
	}
}
