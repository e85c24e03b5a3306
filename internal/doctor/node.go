package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/unixsock"
)

// kubelets finds the kubelet and compares its root directory with ours.
func (x *diagnosis) kubelets(ctx context.Context) {
	defer x.directory(ctx)
	all, seen := x.processes(ctx)
	found, ignored := x.findKubelets(ctx, all)
	for _, p := range ignored[:min(len(ignored), 3)] {
		x.checked("", StepKubelet, Skipped, "%s is not a process of root and is ignored", p)
	}
	ours := x.config.Config.Kubelet.RootDir
	switch {
	case len(found) == 0 && !seen:
		x.checked("", StepKubelet, Skipped, "other users' processes cannot be seen; run doctor as root, on the node itself")
		return
	case len(found) == 0:
		x.problem("", StepKubelet, NoKubelet, "no kubelet runs on this node (nor k3s, rke2, k0s or microk8s)", "it runs: drivers are registered with it",
			systemctl("start", "kubelet.service"), logOf("kubelet.service"))
		return
	}
	// Several, where nodes are simulated or run in containers: the one that is configured is
	// meant. Those in containers may well have the same path, but another directory.
	same := slices.IndexFunc(found, func(k kubelet) bool {
		return k.rootDir != "" && x.sameFile(ctx, x.seenBy(&k, k.rootDir), ours)
	})
	if same < 0 { // their view may not be seen
		same = slices.IndexFunc(found, func(k kubelet) bool {
			return k.rootDir == ours || k.rootDir != "" && x.sameFile(ctx, filepath.Join(x.o.Root, k.rootDir), ours)
		})
	}
	x.kubelet = &found[max(same, 0)]
	k := x.kubelet
	for i := range found {
		if other := &found[i]; other != k {
			x.checked("", StepKubelet, Skipped, "another kubelet is left out: %s, root directory %s", other.process,
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
			safetext.Word(k.rootDir), safetext.Word(ours), place(x.config.Origin("kubelet.root_dir"))),
			"root_dir = "+safetext.Quote(k.rootDir)+" under [kubelet]", x.setRootDir(k.rootDir)...)
	}
}

// seenBy is a path in the kubelet's own view of the file system.
func (x *diagnosis) seenBy(k *kubelet, file string) string {
	return x.ofProcess(k.pid, "root", file)
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

// setRootDir follows the kubelet to its root directory.
func (x *diagnosis) setRootDir(dir string) []Fix {
	at := x.config.Origin("kubelet.root_dir")
	if at == "default" {
		at = cmp.Or(x.o.Source.File, filepath.Join(x.confDir(), "90-kubelet.toml"))
	}
	return append([]Fix{text("write root_dir = %s under [kubelet] in %s", safetext.Quote(dir), place(at))}, installDropIn(dir)...)
}

// directory looks at plugins_registry itself.
func (x *diagnosis) directory(ctx context.Context) {
	if x.problemIn(StepKubelet) && x.kubelet != nil { // it is another one that counts
		return
	}
	dir := x.registry()
	shown := safetext.Word(dir)
	at, err := x.stat(ctx, dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		x.problem("", StepDirectory, RegistryMissing, shown+" does not exist",
			"root_dir under [kubelet] is the kubelet's; it makes the directory when it starts, and watches it from then on",
			x.kubelet.restart())
	case errors.Is(err, fs.ErrPermission):
		x.warning("", StepDirectory, NotRoot, shown+" cannot be looked at: permission denied", "", asRoot)
	case err != nil:
		x.problem("", StepDirectory, RegistryUnreadable, fmt.Sprintf("%s cannot be looked at: %v", shown, err), "a directory on a file system that answers")
	case !at.IsDir():
		x.problem("", StepDirectory, RegistryNotDirectory, shown+" is "+at.Kind(), "a directory", run("rm", dir), x.kubelet.restart())
	case at.Mode&0o022 != 0:
		x.problem("", StepDirectory, RegistryWritable,
			fmt.Sprintf("others than root may write to %s (mode %04o): they could register any driver", shown, at.Mode&0o777),
			"mode 0750", run("chmod", "0750", dir))
	default:
		x.checked("", StepDirectory, OK, "%s", shown)
	}
}

// watching finds out whether the kubelet watches the very directory in which we publish. It
// never looks for the directory again once that was removed (kubelet v1.36).
func (x *diagnosis) watching(ctx context.Context) {
	if x.kubelet == nil || x.kubelet.rootDir == "" || x.problemIn(StepKubelet, StepDirectory) {
		return
	}
	dir, restart := safetext.Word(x.registry()), x.kubelet.restart()
	answer, err := look(ctx, x, x.ofProcess(x.kubelet.pid, "fdinfo"), func() (watching, error) {
		return watches(x.ofProcess(x.kubelet.pid), x.registry())
	})
	switch {
	case err != nil:
		x.checked("", StepWatching, Skipped, "what the kubelet watches cannot be seen: %v", err)
	case answer == watched:
		x.checked("", StepWatching, OK, "the kubelet watches %s", dir)
	case answer == nothing:
		x.problem("", StepWatching, KubeletNotWatching,
			fmt.Sprintf("%s watches no directory at all: it has just started, or hangs in its start", x.kubelet.process),
			"it watches "+dir, text("wait 10 s and run doctor again"), restart)
	default:
		x.problem("", StepWatching, KubeletWatchesDeleted,
			fmt.Sprintf("%s does not watch %s but a directory that was there before and is deleted", x.kubelet.process, dir),
			"it watches the directory that is there now; only its restart can do that", restart)
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
