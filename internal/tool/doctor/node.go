package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/distro"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// kubelets finds the kubelet and compares its root directory with the configured one.
func (x *diagnosis) kubelets(ctx context.Context) {
	defer x.directory(ctx)
	all, seen := x.processes(ctx)
	found, rootless, ignored := x.findKubelets(ctx, all)
	x.runtimes = slices.DeleteFunc(all, func(p process) bool { return !slices.Contains(distro.Runtimes, p.comm) || !p.root() || p.inPod })
	for _, why := range ignored[:min(len(ignored), 3)] {
		x.checked("", "kubelet", Skipped, "%s and is ignored", why)
	}
	ours := x.config.Config.Kubelet.RootDir
	switch {
	case len(found) == 0 && !seen:
		x.checked("", "kubelet", Skipped, "other users' processes are not visible; run doctor as root, on the node itself")
		return
	case len(found) == 0:
		for _, k := range rootless {
			x.finding("", "kubelet", "kubelet-rootless", k.String()+" runs as another user than root, in a user namespace: the registration sockets refuse it",
				"a kubelet of root", note("run node-driver-registrar beside each driver instead, in the user namespace of that kubelet"))
		}
		unit := x.installedKubelet(ctx)
		ended, start := x.lastExit(ctx, unit)
		if ended != "" {
			state, fix := x.runtimeState(ctx)
			if state != "" { // its socket is missing, and without it the kubelet does not start
				about := regexp.MustCompile(`\.sock|to start without it|^# systemctl stop`)
				start = slices.DeleteFunc(start, func(f Fix) bool { return about.MatchString(f.String()) })
			}
			for _, r := range x.runtimes {
				if at := x.runtimeSockets(ctx, r); strings.Contains(ended, "for endpoint ") && len(at) > 0 {
					state += "; " + r.String() + " listens on " + safetext.Word(at[0])
				}
			}
			ended, start = ended+state, append(fix, start...)
		}
		x.finding("", "kubelet", "no-kubelet", "no kubelet runs on this node, nor a program that contains one ("+strings.Join(distro.Processes[1:], ", ")+")"+ended,
			"it runs: drivers are registered with it", append(start, systemctl("start", unit), logOf(unit))...)
		return
	}
	// There are several where nodes are simulated or run in containers: select the one with the
	// configured root directory. In a container the same path may be another directory.
	same := slices.IndexFunc(found, func(k kubelet) bool {
		return k.rootDir != "" && x.sameFile(ctx, x.procPath(k.pid, "root", k.rootDir), ours)
	})
	if same < 0 { // their views may not be accessible
		same = slices.IndexFunc(found, func(k kubelet) bool {
			return k.rootDir == ours || k.rootDir != "" && x.sameFile(ctx, filepath.Join(x.o.Root, k.rootDir), ours)
		})
	}
	if x.kubelet = &found[max(same, 0)]; same < 0 { // a k3s server without an agent has none
		if known := slices.IndexFunc(found, func(k kubelet) bool { return k.rootDir != "" }); known >= 0 {
			x.kubelet = &found[known]
		}
	}
	k := x.kubelet
	k.unit = x.unitOfKubelet(ctx, k.process)
	for _, p := range append(x.runtimes, k.process) {
		if strings.HasSuffix(p.unit, ".service") && !p.confined {
			x.enabled(ctx, "", "kubelet", p.unit)
		}
	}
	for i := range found {
		other := &found[i]
		text := fmt.Sprintf("another kubelet is ignored: %s, root directory %s", other.process, safetext.Word(cmp.Or(other.rootDir, "unknown")))
		switch {
		case other == k:
		case other.confined: // of a node in a container
			x.checked("", "kubelet", Skipped, "%s", text)
		default:
			if other.unit == k.unit {
				other.unit = ""
			}
			x.finding("", "kubelet", "second-kubelet", text, "one kubelet, with which the drivers are registered", note("if it is to stay, and the other one not: set root_dir to its directory under [kubelet]"), note("if it is left from another distribution"), optional(other.stop()))
		}
	}
	again, fix := x.restarts(ctx, k.process, time.Hour) // k3s reports late
	switch {
	case again != "":
		x.finding("", "kubelet", "no-kubelet", again, "it keeps running", slices.Concat([]Fix{logOf(k.unit)}, fix, []Fix{k.restart()})...)
	case x.show(ctx, k.service())["FreezerState"] == "frozen":
		x.finding("", "kubelet", "kubelet-frozen", k.String()+" is frozen, by systemctl freeze: no volume is mounted or unmounted", "it runs", systemctl("thaw", k.service()))
	case k.stopped:
		x.finding("", "kubelet", "kubelet-frozen", k.String()+" is stopped by a signal, SIGSTOP: no volume is mounted or unmounted", "it runs", run("kill", "-CONT", strconv.Itoa(k.pid)))
	case same >= 0:
		x.checked("", "kubelet", OK, "%s, root directory %s", k.process, safetext.Word(k.rootDir))
	case k.rootDir == "":
		x.checked("", "kubelet", Skipped, "%s: its root directory is not known: %v", k.process, k.unknown)
	default:
		found := ""
		key := x.setKey("root-dir", "[kubelet]", "root_dir = "+safetext.Quote(k.rootDir), x.config.Origin("kubelet.root_dir"))
		fix := append(key, installDropIn(k.rootDir)...)
		if stuck := x.stuckVolumes(); stuck != "" { // the kubelet was moved
			set, undo := x.dropIns(ctx, k.unit)
			found = stuck + set
			fix = slices.Concat(undo, []Fix{note("if it was moved on purpose, the next lines move csi-registrar with it and give up these volumes: drain the node before")}, fix, []Fix{giveUp})
		}
		x.finding("", "kubelet", "root-dir-mismatch", fmt.Sprintf("%s has the root directory %s, but csi-registrar publishes below %s (%s)%s", k.process,
			safetext.Word(k.rootDir), safetext.Word(ours), x.config.Origin("kubelet.root_dir"), found),
			"root_dir = "+safetext.Quote(k.rootDir)+" under [kubelet]", fix...)
	}
}

// kubeletErrors returns the errors that match a pattern and that the running kubelet has logged
// within some time, the last one first. On k0s another process logs for it.
func (x *diagnosis) kubeletErrors(ctx context.Context, within time.Duration, pattern string) []string {
	if ran := x.runsFor(x.kubelet.pid); ran > 0 {
		within = min(within, ran)
	}
	lines := x.o.Units.Journal(ctx, x.kubelet.service(), "--lines=100", "--reverse", fmt.Sprintf("--since=-%dms", within.Milliseconds()),
		`--grep=\b[EF][0-9]{4} .*(`+pattern+")")
	return slices.DeleteFunc(lines, func(line string) bool { return line == "" })
}

func (x *diagnosis) sameFile(ctx context.Context, a, b string) bool {
	one, err := x.stat(ctx, a)
	if err != nil {
		return false
	}
	two, err := x.stat(ctx, b)
	return err == nil && one.FileID == two.FileID
}

func (x *diagnosis) stat(ctx context.Context, file string) (unixsock.File, error) {
	return look(ctx, x, file, func() (unixsock.File, error) { return unixsock.Stat(file) })
}

// directory checks plugins_registry itself.
func (x *diagnosis) directory(ctx context.Context) {
	dir := x.registry()
	shown := safetext.Word(dir)
	at, err := x.stat(ctx, dir)
	x.link(ctx, dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		x.finding("", "plugins_registry", "plugins-registry-missing", shown+" does not exist",
			"root_dir under [kubelet] is the kubelet's; it creates the directory when it starts, and watches it from then on",
			x.kubelet.restart())
	case errors.Is(err, fs.ErrPermission):
		x.finding("", "plugins_registry", "not-root", shown+" cannot be examined: permission denied", "", asRoot)
	case err != nil:
		where, fix := x.unreadable(ctx, dir, err)
		x.finding("", "plugins_registry", "plugins-registry-unreadable", fmt.Sprintf("%s cannot be examined: %v%s", shown, err, where), "a directory on a file system that answers", fix...)
	case !at.IsDir():
		x.finding("", "plugins_registry", "plugins-registry-not-directory", shown+" is "+at.Kind(), "a directory", append(x.remove(ctx, dir, at), x.kubelet.restart(), systemctl("restart", serviceUnit))...)
	default:
		x.replaceable(dir, x.trusted(ctx, dir))
		x.space(ctx, dir)
	}
}

// link reports that plugins_registry is a symbolic link, which the kubelet does not follow when it
// looks for sockets at its start.
func (x *diagnosis) link(ctx context.Context, dir string) {
	target, err := look(ctx, x, dir, func() (string, error) {
		if at, err := unixsock.Lstat(dir); err != nil || !at.IsLink() {
			return "", err
		}
		return filepath.EvalSymlinks(dir)
	})
	if err != nil || target == "" {
		return
	}
	unit := x.kubelet.service()
	fix := []Fix{note("replace the link %s by a bind mount of %s, and restart the kubelet", safetext.ShellWord(dir), safetext.ShellWord(target))}
	if x.rootOnly(ctx, dir) && x.trusted(ctx, target) == nil {
		fix = []Fix{note("after a reboot the directory need not be a mount"), systemctl("stop", unit), run("rm", dir), run("mkdir", "-m", "0750", dir),
			run("mount", "--bind", target, dir), systemctl("restart", serviceUnit), systemctl("start", unit)}
	}
	x.finding("", "plugins_registry", "plugins-registry-link", safetext.Word(dir)+" is a symbolic link to "+safetext.Word(target)+": a kubelet that starts does not find the sockets in it",
		"a directory; csi-registrar reregister DRIVER helps until the next restart of the kubelet", fix...)
}

// trusted returns an error if users other than root can change a path, or a directory or link on
// the way to it.
func (x *diagnosis) trusted(ctx context.Context, file string) error {
	return x.check(ctx, file, func() error {
		owners, _ := trust.Users("root") // root needs no lookup
		return trust.Rule{Owners: owners}.Check(file)
	})
}

// replaceable reports an error of trusted about plugins_registry: users other than root can write
// to it, or replace it.
func (x *diagnosis) replaceable(dir string, err error) {
	untrusted, ok := errors.AsType[*trust.Error](err)
	switch {
	case err == nil:
		x.checked("", "plugins_registry", OK, "%s", safetext.Word(dir))
		return
	case !ok:
		x.checked("", "plugins_registry", Skipped, "who may replace %s is not known: %v", safetext.Word(dir), err)
		return
	}
	fix := note("make all directories and links on the path of %s writable for root only", safetext.ShellWord(dir))
	if c := untrusted.Command; c.Name != "" && c.Name != "rm" { // the kubelet needs a link
		fix = Fix{Command: c}
	}
	x.finding("", "plugins_registry", "plugins-registry-writable",
		fmt.Sprintf("%v: other users than root could write to %s, or replace it, and register any driver", untrusted, safetext.Word(dir)),
		"only root can change it, or a directory on its path", fix)
}

// watching checks that the kubelet watches the directory in which we publish. Once that is removed,
// the kubelet never looks for it again (kubelet v1.36).
func (x *diagnosis) watching(ctx context.Context) {
	if x.kubelet == nil || x.kubelet.rootDir == "" {
		return
	}
	if state, fix := x.runtimeState(ctx); state != "" {
		x.finding("", "kubelet", "no-runtime", "no container runtime works"+state, "it runs: without it the kubelet starts and stops no pod", fix...)
	}
	dir, restart := safetext.Word(x.registry()), x.kubelet.restart()
	answer, err := look(ctx, x, x.procPath(x.kubelet.pid, "fdinfo"), func() (watching, error) {
		return watches(x.procPath(x.kubelet.pid), x.registry())
	})
	view := x.procPath(x.kubelet.pid, "root", x.registry())
	_, seen := x.stat(ctx, view)
	point := x.mountOf(ctx, x.registry()).Point
	switch {
	case err != nil:
		x.checked("", "watching", Skipped, "the watches of the kubelet cannot be read: %v", err)
	case answer == watched:
		x.checked("", "watching", OK, "the kubelet watches %s", dir)
	case answer == nothing:
		x.finding("", "watching", "kubelet-not-watching", x.kubelet.process.String()+" is not watching yet: it has just started, or waits for its container runtime",
			"it watches "+dir, note("after 10 seconds, if doctor still reports this"), restart)
	case seen == nil && !x.sameFile(ctx, view, x.registry()):
		why, fix := x.hidden(ctx, x.kubelet.process, "has another directory at "+dir)
		x.finding("", "watching", "plugins-registry-covered", why, "the kubelet has the same directory as the node", fix...)
	case rootdir.Within(point, path.Clean(x.config.Config.Kubelet.RootDir)):
		x.finding("", "watching", "plugins-registry-covered",
			fmt.Sprintf("%s does not watch %s but a directory that was there before: the mount at %s covers it", x.kubelet.process, dir, safetext.Word(point)),
			"the kubelet watches the directory that is there now: the file system is mounted before the kubelet starts",
			note("if the mount is intended, otherwise unmount %s", safetext.ShellWord(point)), restart, systemctl("restart", serviceUnit))
	default:
		x.finding("", "watching", "kubelet-watches-deleted",
			fmt.Sprintf("%s does not watch %s but a directory that was there before and is deleted", x.kubelet.process, dir),
			"it watches the directory that is there now; only its restart can do that", restart)
	}
}
