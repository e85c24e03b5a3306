package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// kubelets finds the kubelet and compares its root directory with ours.
func (x *exam) kubelets() {
	all, seen := processes(x.proc())
	found := kubelets(x.o.Root, all)
	ours := x.config.Config.Kubelet.RootDir
	switch {
	case len(found) == 0 && !seen:
		x.checked("", StepKubelet, Skipped, "other users' processes cannot be seen; run doctor as root, on the node itself")
		x.folderThere()
		return
	case len(found) == 0:
		x.found(&Finding{Step: StepKubelet, Severity: Problem, explains: true,
			Is: "no kubelet runs on this node (nor k3s, rke2, k0s or microk8s)", Should: "it runs: drivers are registered with it",
			Fix: []string{"systemctl start kubelet.service", "journalctl -u kubelet.service -n 50"}})
		x.folderThere()
		return
	}
	// Several, where nodes are simulated or run in containers: the one that is configured is
	// meant. Those in containers may well have the same path, but another folder.
	same := slices.IndexFunc(found, func(k kubelet) bool { return x.sameFolder(k, ours) })
	if same < 0 {
		same = slices.IndexFunc(found, func(k kubelet) bool { return x.sameRoot(k, ours) })
	}
	x.kubelet = &found[max(same, 0)]
	k := x.kubelet
	if same >= 0 {
		x.checked("", StepKubelet, OK, fmt.Sprintf("%s, root directory %s", k.process, k.rootDir))
		x.folderThere()
		return
	}
	if k.rootDir == "" {
		x.checked("", StepKubelet, Skipped, fmt.Sprintf("%s: its root directory is not known: %s", k.process, k.from))
		x.folderThere()
		return
	}
	x.found(&Finding{Step: StepKubelet, Severity: Problem, explains: true,
		Is:     fmt.Sprintf("%s has the root directory %s (%s), but csi-registrar publishes below %s (%s)", k.process, k.rootDir, k.from, ours, x.config.Origin("kubelet.root_dir")),
		Should: fmt.Sprintf("root_dir = %q under [kubelet]", k.rootDir),
		Fix:    x.setRootDir(k.rootDir)})
}

// sameFolder tells whether the kubelet's root directory, as it sees it itself, is ours.
func (x *exam) sameFolder(k kubelet, ours string) bool {
	return k.rootDir != "" && sameFile(filepath.Join(x.proc(), strconv.Itoa(k.pid), "root", k.rootDir), ours)
}

// sameRoot tells it of the paths, for a kubelet whose view cannot be seen.
func (x *exam) sameRoot(k kubelet, ours string) bool {
	return k.rootDir != "" && (k.rootDir == ours || sameFile(filepath.Join(x.o.Root, k.rootDir), ours))
}

func sameFile(a, b string) bool {
	one, err := os.Stat(a)
	if err != nil {
		return false
	}
	two, err := os.Stat(b)
	return err == nil && os.SameFile(one, two)
}

// setRootDir gives the commands that follow the kubelet to its root directory.
func (x *exam) setRootDir(dir string) []string {
	file := filepath.Join(x.folder("etc"), "90-kubelet.toml")
	at := x.config.Origin("kubelet.root_dir")
	if i := strings.LastIndexByte(at, ':'); i > 0 {
		// A drop-in that comes later would win over ours.
		if at = at[:i]; x.o.Source.File != "" || path.Base(path.Dir(at)) == "conf.d" && path.Base(at) > path.Base(file) {
			return append([]string{fmt.Sprintf("write root_dir = %q under [kubelet] in %s", dir, at)}, installUnitDropIn(dir)...)
		}
	}
	write := []string{
		"mkdir -p " + shellQuote(path.Dir(file)),
		"printf '[kubelet]\\nroot_dir = \"%s\"\\n' " + shellQuote(dir) + " > " + shellQuote(file),
	}
	return append(write, installUnitDropIn(dir)...)
}

// folderThere looks at plugins_registry itself.
func (x *exam) folderThere() {
	folder := x.registry()
	info, err := os.Stat(folder)
	f := Finding{Step: StepFolder, Severity: Problem, explains: true}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Is = folder + " does not exist"
		f.Should = "the kubelet makes it when it starts, and follows it from then on"
		f.Fix = []string{x.restartKubelet()}
		if _, err := os.Stat(path.Dir(folder)); errors.Is(err, fs.ErrNotExist) {
			f.Is = "the kubelet's root directory " + path.Dir(folder) + " does not exist"
			f.Should = "root_dir under [kubelet] is where the kubelet is"
		}
	case err != nil:
		f.Severity, f.explains = Warning, false
		f.Is = fmt.Sprintf("%s cannot be looked at: %v", folder, err)
		f.Fix = []string{"sudo csi-registrar doctor"}
	case !info.IsDir():
		f.Is = folder + " is no folder"
		f.Should = "a folder"
		f.Fix = []string{"rm " + shellQuote(folder), x.restartKubelet()}
	case info.Mode().Perm()&0o022 != 0:
		f.explains = false
		f.Is = fmt.Sprintf("others than root may write to %s (mode %04o): they could register any driver", folder, info.Mode().Perm())
		f.Should = "mode 0750"
		f.Fix = []string{"chmod 0750 " + shellQuote(folder)}
	default:
		x.checked("", StepFolder, OK, folder)
		return
	}
	x.found(&f)
}

func (x *exam) restartKubelet() string {
	if x.kubelet == nil {
		return "systemctl restart kubelet.service"
	}
	return x.kubelet.restart()
}

// watching finds out whether the kubelet follows the very folder in which we publish. It
// never looks for the folder again once that was removed (kubelet v1.36).
func (x *exam) watching() {
	if x.kubelet == nil || x.problemIn(StepKubelet, StepFolder) {
		return
	}
	answer, err := watches(x.proc(), x.kubelet.pid, x.registry())
	switch {
	case err != nil || answer == unknown:
		x.checked("", StepWatching, Skipped, fmt.Sprintf("what the kubelet watches cannot be seen: %v", err))
	case answer == follows:
		x.checked("", StepWatching, OK, "the kubelet follows "+x.registry())
	case answer == nowhere:
		x.found(&Finding{Step: StepWatching, Severity: Problem, explains: true,
			Is: fmt.Sprintf("%s watches no folder at all: it has just started, or hangs in its start", x.kubelet.process), Should: "it follows " + x.registry(),
			Fix: []string{"wait 10 s and run doctor again", x.kubelet.restart()}})
	default:
		x.found(&Finding{Step: StepWatching, Severity: Problem, explains: true,
			Is:     fmt.Sprintf("%s does not watch %s but a folder that was there before and is deleted", x.kubelet.process, x.registry()),
			Should: "it follows the folder that is there now; only its restart can do that",
			Fix:    []string{x.kubelet.restart()}})
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
