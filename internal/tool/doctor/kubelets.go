package doctor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/distro"
	"csi-registrar/internal/sys/safetext"
)

// kubelet is a running kubelet, or a program that contains one.
type kubelet struct {
	process
	rootDir string // empty: not known
	unknown error  // why rootDir is not known
}

// service returns the unit that runs the kubelet; k may be nil.
func (k *kubelet) service() string {
	if k == nil || !strings.HasSuffix(k.unit, ".service") {
		return "kubelet.service"
	}
	return k.unit
}

func (k *kubelet) restart() Fix { return systemctl("restart", k.service()) }

// findKubelets finds the kubelets among all processes. Any process can choose its name, so
// processes of other users and of pods are ignored.
//
// A kubelet in a container or a snap counts only if its directory is the configured one, or one
// that a distribution uses: its paths are not those of the node, and a malicious container could
// otherwise make doctor print a root_dir of its choice.
//
// A kubelet of another user whose directory is the configured one is rootless.
func (x *diagnosis) findKubelets(ctx context.Context, all []process) (found, rootless []kubelet, ignored []string) {
	for _, p := range all {
		switch {
		case !slices.Contains(distro.Processes, p.comm):
			continue
		case p.inPod:
			ignored = append(ignored, p.String()+" runs in a pod")
			continue
		}
		dir, err := look(ctx, x, x.procPath(p.pid, "fd"), func() (string, error) { return rootDir(x.procPath(p.pid)) })
		if !p.root() {
			if err == nil && x.sameFile(ctx, x.procPath(p.pid, "root", dir), x.config.Config.Kubelet.RootDir) {
				rootless = append(rootless, kubelet{p, dir, err})
			} else {
				ignored = append(ignored, p.String()+" is not a process of root")
			}
			continue
		}
		if p.confined && err == nil {
			if dir = x.outside(ctx, p, dir); dir == "" {
				ignored = append(ignored, p.String()+" has its own root file system")
				continue
			}
		}
		found = append(found, kubelet{p, dir, err})
	}
	return found, rootless, ignored
}

// unitOfKubelet returns the unit that runs a kubelet. It need not be that of its cgroup: with
// kubeletCgroups in its configuration the kubelet moves itself into another one, on k0s that of
// containerd.service, which may not exist. The parent's unit is used only if it is known to run
// kubelets, because the parent of a kubelet in a container is a shim of the container runtime.
func (x *diagnosis) unitOfKubelet(ctx context.Context, p process) string {
	if slices.Contains(distro.Units, p.unit) {
		return p.unit
	}
	if p.parent > 1 {
		if parent, ok := x.process(ctx, p.parent); ok && parent.root() && slices.Contains(distro.Units, parent.unit) {
			return parent.unit
		}
	}
	for _, unit := range distro.Units {
		if x.show(ctx, unit)["MainPID"] == strconv.Itoa(p.pid) {
			return unit
		}
	}
	return p.unit
}

// outside returns the path on the node of a directory of a process in a container; empty if it is
// not an expected one.
func (x *diagnosis) outside(ctx context.Context, p process, dir string) string {
	inside := x.procPath(p.pid, "root", dir)
	for _, d := range slices.Concat([]string{x.config.Config.Kubelet.RootDir}, distro.RootDirs) {
		if x.sameFile(ctx, inside, d) || x.sameFile(ctx, inside, filepath.Join(x.o.Root, d)) {
			return d
		}
	}
	return ""
}

// installedKubelet returns the unit that should run the kubelet of this node. It is the first known
// unit that is enabled, because packages of another distribution may still be installed, or else
// the first one that exists.
func (x *diagnosis) installedKubelet(ctx context.Context) (unit string) {
	for _, u := range distro.Units {
		p := x.show(ctx, u)
		switch {
		case p["LoadState"] != "loaded":
		case strings.HasPrefix(p["UnitFileState"], "enabled"):
			return u
		case unit == "":
			unit = u
		}
	}
	return cmp.Or(unit, "kubelet.service")
}

// maxSockets limits the list of Unix sockets in bytes: about 80,000 sockets.
const maxSockets = 8 << 20

// rootDir returns the kubelet's root directory. Each kubelet listens in pod-resources below it
// (by default since v1.15), no matter which distribution, flag or file sets the directory. proc is
// the kubelet's directory in /proc.
func rootDir(proc string) (string, error) {
	own, err := listening(proc)
	if err != nil {
		return "", err
	}
	var dirs []string
	for _, socket := range own.paths {
		// The kubelet renames the socket after it was bound, within its directory.
		if dir := path.Dir(socket); path.Base(dir) == "pod-resources" {
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
	// A path can contain a line break and so forge a line.
	return "", fmt.Errorf("it listens in %d directories pod-resources", len(dirs))
}

// sockets are the TCP ports and the paths of the Unix sockets on which a process listens.
type sockets struct{ ports, paths []string }

// listening returns the sockets of a process. proc is its directory in /proc; only root can read
// its descriptors.
func listening(proc string) (s sockets, err error) {
	var inodes []string
	descriptors, err := os.ReadDir(filepath.Join(proc, "fd"))
	for _, d := range descriptors {
		target, _ := os.Readlink(filepath.Join(proc, "fd", d.Name())) // an error: it was closed
		if inode, ok := strings.CutPrefix(target, "socket:["); ok {
			inodes = append(inodes, strings.TrimSuffix(inode, "]"))
		}
	}
	for _, table := range []string{"net/tcp", "net/tcp6", "net/unix"} {
		list, _ := readSome(filepath.Join(proc, table), maxSockets) // there may be no IPv6
		for line := range strings.Lines(string(list)) {
			// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
			// Num RefCount Protocol Flags Type St Inode Path
			switch fields := strings.Fields(line); {
			case len(fields) > 9 && fields[3] == "0A" && slices.Contains(inodes, fields[9]):
				_, port, _ := strings.Cut(fields[1], ":")
				n, _ := strconv.ParseUint(port, 16, 16)
				s.ports = append(s.ports, strconv.FormatUint(n, 10))
			case len(fields) > 7 && fields[3] == "00010000" && slices.Contains(inodes, fields[6]):
				_, bound, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " /")
				s.paths = append(s.paths, path.Clean("/"+bound))
			}
		}
	}
	return s, err
}

// listening returns the sockets of a process; none if it has ended, or is hidden.
func (x *diagnosis) listening(ctx context.Context, pid int) sockets {
	proc := x.procPath(pid)
	s, _ := look(ctx, x, proc, func() (sockets, error) { return listening(proc) })
	return s
}

// procPath returns the path of a file of a process in /proc. Below "root" are the files of the node
// as the process sees them.
func (x *diagnosis) procPath(pid int, elem ...string) string {
	return filepath.Join(append([]string{x.o.Root, "proc", strconv.Itoa(pid)}, elem...)...)
}

// watching is the relation of a process to a directory.
type watching int

const (
	nothing   watching = iota // it has no inotify watches
	elsewhere                 // it watches only other directories
	watched                   // it watches the directory
)

const maxWatches = 4 << 20 // bytes of a file in fdinfo: about 40,000 watches

// watches looks for dir among the inotify watches of a process. proc is its directory in /proc;
// only root can read its fdinfo (proc(5)).
//
// The kernel prints its internal device number, which on btrfs and overlayfs differs from that of
// stat: there only the inode is compared.
func watches(proc, dir string) (watching, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nothing, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	inode := "ino:" + strconv.FormatUint(st.Ino, 16)
	device := "sdev:" + strconv.FormatUint(uint64(unix.Major(st.Dev))<<20|uint64(unix.Minor(st.Dev)), 16)
	var system unix.Statfs_t
	_ = unix.Statfs(dir, &system) // zero after an error
	kind := uint32(system.Type)   // its type differs between architectures
	anyDevice := kind == unix.BTRFS_SUPER_MAGIC || kind == unix.OVERLAYFS_SUPER_MAGIC

	fdinfo := filepath.Join(proc, "fdinfo")
	entries, err := os.ReadDir(fdinfo)
	if err != nil {
		return nothing, err
	}
	answer := nothing
	for _, e := range entries {
		data, err := readSome(filepath.Join(fdinfo, e.Name()), maxWatches)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it was closed
		}
		if err != nil {
			return nothing, err
		}
		for line := range strings.Lines(string(data)) {
			fields := " " + strings.TrimSpace(line) + " "
			if !strings.HasPrefix(fields, " inotify ") {
				continue
			}
			if strings.Contains(fields, " "+inode+" ") && (anyDevice || strings.Contains(fields, " "+device+" ")) {
				return watched, nil
			}
			answer = elsewhere
		}
	}
	return answer, nil
}

// apiServer returns the address of the API server in the kubelet's kubeconfig, and its place; nil
// if it is not known.
func (x *diagnosis) apiServer(ctx context.Context) (*url.URL, string) {
	file := x.kubeletFlag("kubeconfig")
	if !path.IsAbs(file) {
		return nil, ""
	}
	text, err := look(ctx, x, file, func() ([]byte, error) { return readSome(x.procPath(x.kubelet.pid, "root", file), maxProcFile) })
	m := regexp.MustCompile(`(?m)^[^#\n]*?\bserver["']?: *["']?(https?://[^\s"',}]+)`).FindSubmatch(text)
	if err != nil || m == nil {
		return nil, ""
	}
	line := 1 + strings.Count(string(text[:bytes.Index(text, m[1])]), "\n")
	server, _ := url.Parse(string(m[1])) // nil after an error
	return server, fmt.Sprintf("%s:%d", safetext.ShellWord(file), line)
}
