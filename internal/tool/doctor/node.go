package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/node/distro"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// kubelets finds the kubelet and compares its root directory with the configured one.
func (x *diagnosis) kubelets(ctx context.Context) {
	defer x.directory(ctx)
	all, seen := x.processes(ctx)
	found, ignored := x.findKubelets(ctx, all)
	for _, why := range ignored[:min(len(ignored), 3)] {
		x.checked("", StepKubelet, Skipped, "%s and is ignored", why)
	}
	ours := x.config.Config.Kubelet.RootDir
	switch {
	case len(found) == 0 && !seen:
		x.checked("", StepKubelet, Skipped, "other users' processes are not visible; run doctor as root, on the node itself")
		return
	case len(found) == 0:
		unit, ended := x.installedKubelet(ctx)
		x.problem("", StepKubelet, NoKubelet, "no kubelet runs on this node, nor a program that contains one ("+strings.Join(distro.Processes()[1:], ", ")+")"+ended,
			"it runs: drivers are registered with it", systemctl("start", unit), logOf(unit))
		return
	}
	// There are several where nodes are simulated or run in containers: select the one with the
	// configured root directory. In a container the same path may be another directory.
	same := slices.IndexFunc(found, func(k kubelet) bool {
		return k.rootDir != "" && x.sameFile(ctx, x.seenBy(&k, k.rootDir), ours)
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
	for i := range found {
		if other := &found[i]; other != k {
			x.checked("", StepKubelet, Skipped, "another kubelet is ignored: %s, root directory %s", other.process,
				safetext.Word(cmp.Or(other.rootDir, "unknown")))
		}
	}
	switch {
	case same >= 0:
		x.checked("", StepKubelet, OK, "%s, root directory %s", k.process, safetext.Word(k.rootDir))
	case k.rootDir == "":
		x.checked("", StepKubelet, Skipped, "%s: its root directory is not known: %v", k.process, k.unknown)
	default:
		x.problem("", StepKubelet, RootDirMismatch, fmt.Sprintf("%s has the root directory %s, but csi-registrar publishes below %s (%s)", k.process,
			safetext.Word(k.rootDir), safetext.Word(ours), x.config.Origin("kubelet.root_dir")),
			"root_dir = "+safetext.Quote(k.rootDir)+" under [kubelet]", x.setRootDir(k.rootDir)...)
	}
}

// seenBy returns a path in the kubelet's own view of the file system.
func (x *diagnosis) seenBy(k *kubelet, file string) string {
	return x.procPath(k.pid, "root", file)
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

// setRootDir configures the kubelet's root directory.
func (x *diagnosis) setRootDir(dir string) []Fix {
	key := x.setKey("root-dir", "[kubelet]", "root_dir = "+safetext.Quote(dir), x.config.Origin("kubelet.root_dir"))
	return append(key, installDropIn(dir)...)
}

// directory checks plugins_registry itself.
func (x *diagnosis) directory(ctx context.Context) {
	if x.problemIn(StepKubelet) && x.kubelet != nil { // the kubelet uses another one
		return
	}
	dir := x.registry()
	shown := safetext.Word(dir)
	at, err := x.stat(ctx, dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		x.problem("", StepDirectory, RegistryMissing, shown+" does not exist",
			"root_dir under [kubelet] is the kubelet's; it creates the directory when it starts, and watches it from then on",
			x.kubelet.restart())
	case errors.Is(err, fs.ErrPermission):
		x.warning("", StepDirectory, NotRoot, shown+" cannot be examined: permission denied", "", asRoot)
	case err != nil:
		where, fix := x.unreadable(ctx, dir, err)
		x.problem("", StepDirectory, RegistryUnreadable, fmt.Sprintf("%s cannot be examined: %v%s", shown, err, where), "a directory on a file system that answers", fix...)
	case !at.IsDir():
		x.problem("", StepDirectory, RegistryNotDirectory, shown+" is "+at.Kind(), "a directory", x.remove(ctx, dir, at), x.kubelet.restart())
	case at.Mode&0o022 != 0:
		fix := note("make %s and all directories on its path writable for root only, then set the mode of %s to 0750", safetext.ShellWord(dir), safetext.ShellWord(dir))
		if e, ok := errors.AsType[*trust.Error](x.trusted(ctx, dir)); ok && e.Command.Name == "chmod" && x.sameFile(ctx, e.Path, dir) {
			fix = run("chmod", "0750", e.Path)
		}
		x.problem("", StepDirectory, RegistryWritable,
			fmt.Sprintf("other users than root may write to %s (mode %04o): they could register any driver", shown, at.Mode&0o777),
			"mode 0750", fix)
		x.space(ctx, dir)
	default:
		if err := x.trusted(ctx, dir); err != nil {
			x.replaceable(dir, err)
		} else {
			x.checked("", StepDirectory, OK, "%s", shown)
		}
		x.space(ctx, dir)
	}
}

// trusted returns an error if users other than root can change a path, or a directory or link on
// the way to it.
func (x *diagnosis) trusted(ctx context.Context, file string) error {
	return x.check(ctx, file, func() error {
		owners, _ := trust.Users("root") // root needs no lookup
		return trust.Rule{Owners: owners}.Check(file)
	})
}

// replaceable reports that users other than root own plugins_registry or can replace it.
func (x *diagnosis) replaceable(dir string, err error) {
	untrusted, ok := errors.AsType[*trust.Error](err)
	if !ok {
		x.checked("", StepDirectory, Skipped, "who may replace %s is not known: %v", safetext.Word(dir), err)
		return
	}
	fix := note("make all directories and links on the path of %s writable for root only", safetext.ShellWord(dir))
	if c := untrusted.Command; c.Name != "" && c.Name != "rm" { // the kubelet needs a link
		fix = Fix{Command: c}
	}
	x.problem("", StepDirectory, RegistryWritable,
		fmt.Sprintf("%v: other users than root could replace %s, and register any driver", untrusted, safetext.Word(dir)),
		"only root can change a directory on its path", fix)
}

// space checks that a registration socket can be created. A kubelet does not start either on a file
// system that is full or read-only.
func (x *diagnosis) space(ctx context.Context, dir string) {
	for _, d := range []string{dir, filepath.Join(x.o.Root, "run")} {
		lacks, err := look(ctx, x, d, func() (string, error) { return unwritable(d) })
		if err == nil && lacks == readOnly {
			x.problem("", StepFileSystem, FileSystemReadOnly, fmt.Sprintf("the file system of %s is read-only: no registration socket can be created", safetext.Word(d)),
				"it is writable", x.remount(ctx, d)...)
			return
		}
		if err == nil && lacks != "" {
			x.problem("", StepFileSystem, FileSystemFull, fmt.Sprintf("the file system of %s has no %s left: no registration socket can be created", safetext.Word(d), lacks),
				"space and inodes are free", run("df", "-h", d), run("df", "-i", d), note("remove files that are not needed from that file system"))
			return
		}
	}
	x.checked("", StepFileSystem, OK, "writable, with space and inodes left")
}

// remount mounts the file system of a directory writable.
func (x *diagnosis) remount(ctx context.Context, dir string) []Fix {
	point := cmp.Or(x.mountOf(ctx, dir).Point, "/")
	fix := []Fix{run("findmnt", "--target", dir), note("if dmesg shows no error of the disk: repair that first")}
	if x.rootOnly(ctx, point) {
		return append(fix, run("mount", "-o", "remount,rw", point), systemctl("restart", serviceUnit))
	}
	return append(fix, note("mount %s writable by hand: another user can change a directory on its path", safetext.ShellWord(point)))
}

// watching checks that the kubelet watches the directory in which we publish. Once that is removed,
// the kubelet never looks for it again (kubelet v1.36).
func (x *diagnosis) watching(ctx context.Context) {
	if x.kubelet == nil || x.kubelet.rootDir == "" || x.problemIn(StepKubelet, StepDirectory) {
		return
	}
	dir, restart := safetext.Word(x.registry()), x.kubelet.restart()
	answer, err := look(ctx, x, x.procPath(x.kubelet.pid, "fdinfo"), func() (watching, error) {
		return watches(x.procPath(x.kubelet.pid), x.registry())
	})
	switch {
	case err != nil:
		x.checked("", StepWatching, Skipped, "the watches of the kubelet cannot be read: %v", err)
	case answer == watched:
		x.checked("", StepWatching, OK, "the kubelet watches %s", dir)
	case answer == nothing:
		x.problem("", StepWatching, KubeletNotWatching,
			fmt.Sprintf("%s watches no directory at all: it has just started, or hangs in its start", x.kubelet.process),
			"it watches "+dir, note("after 10 seconds, if doctor still reports this"), restart)
	case x.covered(ctx) != "":
		point := x.covered(ctx)
		x.problem("", StepWatching, RegistryCovered,
			fmt.Sprintf("%s does not watch %s but a directory that was there before: the mount at %s covers it", x.kubelet.process, dir, safetext.Word(point)),
			"the kubelet watches the directory that is there now: the file system is mounted before the kubelet starts",
			note("if the mount is intended, otherwise unmount %s", safetext.ShellWord(point)), restart, systemctl("restart", serviceUnit))
	default:
		x.problem("", StepWatching, KubeletWatchesDeleted,
			fmt.Sprintf("%s does not watch %s but a directory that was there before and is deleted", x.kubelet.process, dir),
			"it watches the directory that is there now; only its restart can do that", restart)
	}
}

// covered returns the mount point that the kubelet's directory is on; empty if it is on the root
// file system, or if the directory that the kubelet watches is deleted.
func (x *diagnosis) covered(ctx context.Context) string {
	m := x.mountOf(ctx, x.registry())
	if systemd.Within(m.Point, path.Clean(x.config.Config.Kubelet.RootDir)) {
		return m.Point
	}
	return ""
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
