package doctor

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// process is a running program, as /proc tells.
type process struct {
	pid  int
	comm string
	args []string
	unit string // the systemd unit that it belongs to; empty if none
}

// kubelet is a running kubelet, or a program that has one in it.
type kubelet struct {
	process
	flavour string // kubelet, k3s, rke2, k0s or microk8s
	rootDir string
	from    string // where rootDir was read
}

const defaultRootDir = "/var/lib/kubelet"

// microk8sCommon is $SNAP_COMMON of that snap.
const microk8sCommon = "/var/snap/microk8s/common"

// processes lists what runs. seen is false if others' command lines are hidden.
func processes(proc string) (all []process, seen bool) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, false
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, ok := readProcess(proc, pid); ok {
			all = append(all, p)
		}
	}
	// With hidepid= not even init is seen.
	seen = slices.ContainsFunc(all, func(p process) bool { return p.pid == 1 })
	return all, seen
}

// readProcess reads one; not ok if it is gone, hidden, or a kernel thread.
func readProcess(proc string, pid int) (process, bool) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	comm, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return process{}, false
	}
	p := process{pid: pid, comm: strings.TrimSpace(string(comm))}
	if cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline")); err == nil {
		p.args = strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
	}
	if cgroup, err := os.ReadFile(filepath.Join(dir, "cgroup")); err == nil {
		p.unit = unitOf(string(cgroup))
	}
	return p, true
}

// unitOf finds the unit in /proc/PID/cgroup: the last component that is one.
func unitOf(cgroup string) string {
	for line := range strings.Lines(cgroup) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 || (fields[1] != "" && fields[1] != "name=systemd") {
			continue
		}
		parts := strings.Split(fields[2], "/")
		for _, part := range slices.Backward(parts) {
			if strings.HasSuffix(part, ".service") || strings.HasSuffix(part, ".scope") {
				return part
			}
		}
	}
	return ""
}

// String names a process for people.
func (p process) String() string {
	s := p.comm + " (pid " + strconv.Itoa(p.pid)
	if p.unit != "" {
		s += ", " + p.unit
	}
	return s + ")"
}

// restart is the command that restarts the kubelet.
func (k kubelet) restart() string {
	if k.flavour == "microk8s" {
		return "snap restart microk8s.daemon-kubelite"
	}
	if strings.HasSuffix(k.unit, ".service") {
		return "systemctl restart " + k.unit
	}
	switch {
	case k.comm == "k3s-server":
		return "systemctl restart k3s.service"
	case k.flavour == "k3s":
		return "systemctl restart k3s-agent.service"
	case k.flavour == "rke2":
		return "systemctl restart rke2-agent.service"
	case k.flavour == "k0s":
		return "systemctl restart k0sworker.service"
	}
	return "systemctl restart kubelet.service"
}

// kubelets finds those that run. A distribution that starts a kubelet of its own as a
// child is told by that child; only where the kubelet is inside of it, or hides its
// command line, the distribution's own files are read.
func kubelets(root string, all []process) []kubelet {
	var found, parents []kubelet
	for _, p := range all {
		if len(p.args) == 0 {
			continue
		}
		switch program := path.Base(p.args[0]); {
		case program == "kubelet" || program == "hyperkube" && slices.Contains(p.args, "kubelet"):
			k := kubelet{process: p, flavour: "kubelet", rootDir: defaultRootDir, from: "its default"}
			if v, ok := lastFlag(p.args, "root-dir"); ok {
				k.rootDir, k.from = v, "its --root-dir"
			}
			found = append(found, k)
		case program == "kubelite":
			found = append(found, microk8s(root, p))
		case program == "k3s" || p.comm == "k3s-server" || p.comm == "k3s-agent":
			if hasKubelet(p.args, "agent", "server") && !slices.Contains(p.args, "--disable-agent") {
				parents = append(parents, rancher(root, "k3s", p))
			}
		case program == "rke2":
			if hasKubelet(p.args, "agent", "server") {
				parents = append(parents, rancher(root, "rke2", p))
			}
		case program == "k0s":
			if hasKubelet(p.args, "worker", "--enable-worker", "--single") {
				parents = append(parents, k0s(p))
			}
		}
	}
	if len(found) == 0 {
		found = parents
	}
	for i := range found {
		if !strings.HasPrefix(found[i].rootDir, "/") { // relative to a folder that we do not know
			found[i].from += " " + found[i].rootDir + ", which is not absolute"
			found[i].rootDir = ""
			continue
		}
		found[i].rootDir = path.Clean(found[i].rootDir)
	}
	return found
}

// hasKubelet tells whether one of the words, subcommands or flags, is among the arguments.
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

// microk8s has its kubelet's flags in a file, with the snap's variables in it.
func microk8s(root string, p process) kubelet {
	k := kubelet{process: p, flavour: "microk8s", rootDir: microk8sCommon + defaultRootDir, from: "microk8s' default"}
	file, ok := lastFlag(p.args, "kubelet-args-file")
	if !ok {
		file = "/var/snap/microk8s/current/args/kubelet"
	}
	data, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return k
	}
	if v, ok := lastFlag(strings.Fields(string(data)), "root-dir"); ok {
		v = os.Expand(strings.Trim(v, `"'`), func(name string) string {
			switch name {
			case "SNAP_COMMON":
				return microk8sCommon
			case "SNAP_DATA":
				return "/var/snap/microk8s/current"
			}
			return "$" + name
		})
		k.rootDir, k.from = v, file
	}
	return k
}

// k0s gives its kubelet a folder below its own.
func k0s(p process) kubelet {
	k := kubelet{process: p, flavour: "k0s", rootDir: "/var/lib/k0s/kubelet", from: "k0s' default"}
	if v, ok := lastFlag(p.args, "data-dir"); ok {
		k.rootDir, k.from = path.Join(v, "kubelet"), "its --data-dir"
	}
	if v, ok := lastFlag(p.args, "kubelet-root-dir"); ok {
		k.rootDir, k.from = v, "its --kubelet-root-dir"
	}
	return k
}

// rancher reads the kubelet's flags that k3s and rke2 were given: on their command line,
// which k3s hides, or in their configuration files, later ones over earlier ones.
func rancher(root, flavour string, p process) kubelet {
	k := kubelet{process: p, flavour: flavour, rootDir: defaultRootDir, from: "its default"}
	files, _ := filepath.Glob(filepath.Join(root, "/etc/rancher", flavour, "config.yaml.d", "*.yaml"))
	slices.Sort(files)
	main := filepath.Join("/etc/rancher", flavour, "config.yaml")
	if v, ok := lastFlag(p.args, "config"); ok {
		main = v
	}
	for _, file := range append([]string{filepath.Join(root, main)}, files...) {
		if v, ok := rancherFile(file); ok {
			k.rootDir, k.from = v, "/"+strings.TrimPrefix(strings.TrimPrefix(file, root), "/")
		}
	}
	for i, a := range p.args {
		v, ok := strings.CutPrefix(a, "--kubelet-arg=")
		if a == "--kubelet-arg" && i+1 < len(p.args) {
			v, ok = p.args[i+1], true
		}
		if dir, isRoot := rootDirOf(v); ok && isRoot {
			k.rootDir, k.from = dir, "its --kubelet-arg"
		}
	}
	return k
}

// rancherFile finds root-dir under kubelet-arg, a text or a list of them ("kubelet-arg+"
// adds to the lists of earlier files).
func rancherFile(file string) (rootDir string, found bool) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", false
	}
	var doc map[string]yaml.Node
	if yaml.Unmarshal(data, &doc) != nil {
		return "", false // its own program will have said so
	}
	for _, key := range []string{"kubelet-arg", "kubelet-arg+"} {
		node, ok := doc[key]
		if !ok {
			continue
		}
		args := []string{node.Value}
		for _, item := range node.Content {
			args = append(args, item.Value)
		}
		for _, a := range args {
			if dir, ok := rootDirOf(a); ok {
				rootDir, found = dir, true
			}
		}
	}
	return rootDir, found
}

func rootDirOf(arg string) (string, bool) {
	return strings.CutPrefix(strings.TrimLeft(arg, "-"), "root-dir=")
}
