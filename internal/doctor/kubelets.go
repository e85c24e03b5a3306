package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// kubelet is a running kubelet, or a program that has one in it.
type kubelet struct {
	process
	rootDir string // empty: not known
	unknown error  // why not
}

// programs are the names of kubelets, and of programs that can have one in them; microk8s' is
// kubelite. Those of k0s and rke2 start one of their own.
var programs = []string{"kubelet", "kubelite", "k3s-server", "k3s-agent"}

// service is the unit whose restart restarts the kubelet; nil is one that was not found.
func (k *kubelet) service() string {
	if k == nil || !strings.HasSuffix(k.unit, ".service") {
		return "kubelet.service"
	}
	return k.unit
}

func (k *kubelet) restart() Fix { return systemctl("restart", k.service()) }

// findKubelets finds those of root among all processes; ignored are the others': a process's
// name is only a word, which anybody can say.
func (x *diagnosis) findKubelets(ctx context.Context, all []process) (found []kubelet, ignored []process) {
	for _, p := range all {
		switch {
		case !slices.Contains(programs, p.comm):
		case !p.root():
			ignored = append(ignored, p)
		default:
			dir, err := look(ctx, x, x.ofProcess(p.pid, "fd"), func() (string, error) { return rootDir(x.ofProcess(p.pid)) })
			found = append(found, kubelet{p, dir, err})
		}
	}
	return found, ignored
}

// maxSockets is how much of the list of Unix sockets is read: some 80,000.
const maxSockets = 8 << 20

// rootDir finds the kubelet's root directory: below it, in pod-resources, each kubelet listens
// (v1.36; by default since v1.15), whatever distribution, flag or file named the directory. proc
// is the kubelet's directory in /proc; its descriptors are for root to see.
func rootDir(proc string) (string, error) {
	descriptors, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return "", err
	}
	var sockets []string
	for _, d := range descriptors {
		target, _ := os.Readlink(filepath.Join(proc, "fd", d.Name())) // an error: it was closed
		if inode, ok := strings.CutPrefix(target, "socket:["); ok {
			sockets = append(sockets, strings.TrimSuffix(inode, "]"))
		}
	}
	list, err := readSome(filepath.Join(proc, "net/unix"), maxSockets)
	if err != nil {
		return "", err
	}
	var dirs []string
	for line := range strings.Lines(string(list)) {
		// Num RefCount Protocol Flags Type St Inode Path. The kubelet renames the socket after
		// it was bound, within its directory.
		fields := strings.Fields(line)
		_, bound, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " /")
		dir := path.Dir("/" + bound)
		if len(fields) > 7 && slices.Contains(sockets, fields[6]) && path.Base(dir) == "pod-resources" {
			dirs = append(dirs, path.Dir(dir))
		}
	}
	slices.Sort(dirs)
	switch dirs = slices.Compact(dirs); len(dirs) {
	case 0:
		return "", errors.New("it does not listen in a directory pod-resources, as a kubelet does")
	case 1:
		return dirs[0], nil
	}
	// A path can have a line break in it, and so look like another line.
	return "", fmt.Errorf("it listens in %d directories pod-resources", len(dirs))
}

// ofProcess is a file of a process.
func (x *diagnosis) ofProcess(pid int, elem ...string) string {
	return filepath.Join(append([]string{x.o.Root, "proc", strconv.Itoa(pid)}, elem...)...)
}
