package doctor

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/safetext"
)

// kubelet is a running kubelet, or a program that has one in it.
type kubelet struct {
	process
	flavour string // kubelet, k3s, rke2, k0s or microk8s
	rootDir string // empty: not known
	from    string // where rootDir was read, or why it is not known; for people
}

const defaultRootDir = "/var/lib/kubelet"

// The directories of that snap.
const (
	microk8sCommon = "/var/snap/microk8s/common"
	microk8sData   = "/var/snap/microk8s/current"
)

// service is the unit whose restart restarts the kubelet.
func (k *kubelet) service() string {
	switch {
	case k == nil:
		return "kubelet.service"
	case strings.HasSuffix(k.unit, ".service"):
		return k.unit
	case k.comm == "k3s-server":
		return "k3s.service"
	}
	return cmp.Or(map[string]string{"k3s": "k3s-agent.service", "rke2": "rke2-agent.service", "k0s": "k0sworker.service"}[k.flavour], "kubelet.service")
}

// restart restarts the kubelet; nil is one that was not found.
func (k *kubelet) restart() Fix {
	if k != nil && k.flavour == "microk8s" {
		return run("snap", "restart", "microk8s.daemon-kubelite")
	}
	return run("systemctl", "restart", k.service())
}

// isKubelet reports whether the process says that it is a kubelet, or has one in it, and
// which: that is only a word, which anybody can say.
func (p process) isKubelet() (flavour string, is bool) {
	if len(p.args) == 0 {
		return "", false
	}
	switch program := path.Base(p.args[0]); {
	case program == "kubelet" || program == "hyperkube" && slices.Contains(p.args, "kubelet"):
		return "kubelet", true
	case program == "kubelite":
		return "microk8s", true
	case program == "k3s" || p.comm == "k3s-server" || p.comm == "k3s-agent":
		return "k3s", hasKubelet(p.args, "agent", "server") && !slices.Contains(p.args, "--disable-agent")
	case program == "rke2":
		return "rke2", hasKubelet(p.args, "agent", "server")
	case program == "k0s":
		return "k0s", hasKubelet(p.args, "worker", "--enable-worker", "--single")
	}
	return "", false
}

// findKubelets finds those of root among all processes; ignored are the others'. A
// distribution that starts a kubelet of its own as a child is known by that child; only where
// the kubelet is inside of it, or hides its command line, the distribution's own files are read.
func (x *diagnosis) findKubelets(ctx context.Context, all []process) (found []kubelet, ignored []process) {
	var parents []kubelet
	for _, p := range all {
		switch flavour, is := p.isKubelet(); {
		case !is:
		case !p.root():
			ignored = append(ignored, p)
		case flavour == "kubelet" || flavour == "microk8s":
			found = append(found, x.kubeletOf(ctx, p, flavour))
		default:
			parents = append(parents, x.kubeletOf(ctx, p, flavour))
		}
	}
	if len(found) == 0 {
		found = parents
	}
	return found, ignored
}

// kubeletOf finds out the kubelet's root directory.
func (x *diagnosis) kubeletOf(ctx context.Context, p process, flavour string) kubelet {
	k := kubelet{process: p, flavour: flavour, rootDir: defaultRootDir, from: "its default"}
	switch flavour {
	case "kubelet":
		k.flag("root-dir", "")
	case "microk8s":
		x.microk8s(ctx, &k)
	case "k0s":
		k.rootDir, k.from = "/var/lib/k0s/kubelet", "k0s' default"
		k.flag("data-dir", "kubelet")
		k.flag("kubelet-root-dir", "")
	default:
		x.rancher(ctx, &k)
	}
	if k.rootDir != "" && !strings.HasPrefix(k.rootDir, "/") { // relative to a directory that we do not know
		k.from += " " + safetext.Word(k.rootDir) + ", which is not absolute"
		k.rootDir = ""
	}
	if k.rootDir != "" {
		k.rootDir = path.Clean(k.rootDir)
	}
	return k
}

// flag takes the root directory from a flag of the command line, if it is there: the
// directory below its value.
func (k *kubelet) flag(name, below string) {
	if v, ok := lastFlag(k.args, name); ok {
		k.rootDir, k.from = path.Join(v, below), "its --"+name
	}
}

// hasKubelet reports whether one of the words, subcommands or flags, is among the arguments.
func hasKubelet(args []string, words ...string) bool {
	return slices.ContainsFunc(args[1:], func(a string) bool {
		name, value, _ := strings.Cut(a, "=")
		return slices.Contains(words, name) && value != "false"
	})
}

// lastFlag finds the value of a flag with one dash or two; the last one counts.
func lastFlag(args []string, name string) (value string, found bool) {
	for i, a := range args {
		key, v, hasValue := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(a, "-"), "-"), "=")
		switch {
		case key != name || !strings.HasPrefix(a, "-"):
		case hasValue:
			value, found = v, true
		case i+1 < len(args):
			value, found = args[i+1], true
		}
	}
	return value, found
}

// read reads a file that has the kubelet's flags. If that may not be, the root directory is
// not known.
func (x *diagnosis) read(ctx context.Context, k *kubelet, file string) ([]byte, bool) {
	data, err := look(ctx, x, file, func() ([]byte, error) { return readTrusted(filepath.Join(x.o.Root, file)) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		k.rootDir, k.from = "", safetext.Word(file)+" is not read: "+err.Error()
	}
	return data, err == nil
}

// microk8s has its kubelet's flags in a file, with the snap's variables in it.
func (x *diagnosis) microk8s(ctx context.Context, k *kubelet) {
	k.rootDir, k.from = microk8sCommon+defaultRootDir, "microk8s' default"
	file, ok := lastFlag(k.args, "kubelet-args-file")
	if !ok {
		file = microk8sData + "/args/kubelet"
	}
	data, ok := x.read(ctx, k, file)
	if !ok {
		return
	}
	if dir, ok := lastFlag(strings.Fields(string(data)), "root-dir"); ok {
		k.rootDir, k.from = snapVariables.Replace(strings.Trim(dir, `"'`)), safetext.Word(file)
	}
}

var snapVariables = strings.NewReplacer("${SNAP_COMMON}", microk8sCommon, "$SNAP_COMMON", microk8sCommon,
	"${SNAP_DATA}", microk8sData, "$SNAP_DATA", microk8sData)

// rancher reads the kubelet's flags that k3s and rke2 were given: on their command line,
// which k3s hides, or in their configuration files, later ones over earlier ones.
func (x *diagnosis) rancher(ctx context.Context, k *kubelet) {
	dir := filepath.Join("/etc/rancher", k.flavour)
	main := filepath.Join(dir, "config.yaml")
	if v, ok := lastFlag(k.args, "config"); ok {
		main = v
	}
	more, _ := look(ctx, x, dir, func() ([]string, error) {
		return filepath.Glob(filepath.Join(x.o.Root, dir, "config.yaml.d", "*.yaml")) // sorted
	})
	for _, file := range append([]string{main}, more...) {
		file = "/" + strings.TrimPrefix(strings.TrimPrefix(file, x.o.Root), "/")
		data, ok := x.read(ctx, k, file)
		if v, found := rancherRootDir(data); ok && found {
			k.rootDir, k.from = v, safetext.Word(file)
		}
	}
	for i, a := range k.args {
		v, ok := strings.CutPrefix(a, "--kubelet-arg=")
		if a == "--kubelet-arg" && i+1 < len(k.args) {
			v, ok = k.args[i+1], true
		}
		if dir, isRoot := rootDirOf(v); ok && isRoot {
			k.rootDir, k.from = dir, "its --kubelet-arg"
		}
	}
}

// rancherRootDir finds root-dir under kubelet-arg, a text or a list of them ("kubelet-arg+"
// adds to the lists of earlier files).
func rancherRootDir(data []byte) (rootDir string, found bool) {
	var doc map[string]yaml.Node
	if yaml.Unmarshal(data, &doc) != nil {
		return "", false // its own program will have said so
	}
	for _, key := range []string{"kubelet-arg", "kubelet-arg+"} {
		node := doc[key]
		for _, item := range append([]*yaml.Node{&node}, node.Content...) {
			if dir, ok := rootDirOf(item.Value); ok {
				rootDir, found = dir, true
			}
		}
	}
	return rootDir, found
}

func rootDirOf(arg string) (string, bool) {
	return strings.CutPrefix(strings.TrimLeft(arg, "-"), "root-dir=")
}
