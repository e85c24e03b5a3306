package daemon

import (
	"io"
	"os"
	"path/filepath"
	"slices"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/mountinfo"
)

// hostMounts has the mounts that the kubelet and systemd see. Those of the sandbox are copies:
// mounts on the host propagate to them, except over or below a mount of the sandbox's own.
const hostMounts = "/proc/1/mountinfo"

// hiddenFromHost returns which directory the host has at a path, and reports whether it is another
// one than this process has. If it is the same as in the last view, so is the answer: nearly all
// mounts are elsewhere. hiddenFromHost blocks for as long as the file system does not answer.
func hiddenFromHost(path string, last view) (onHost string, hidden bool, err error) {
	if path, err = filepath.EvalSymlinks(path); err != nil { // as in mountinfo
		return "", false, err
	}
	onHost, err = locateIn(hostMounts, path)
	if err != nil || onHost == last.onHost {
		return onHost, err == nil && last.hidden, err
	}
	here, err := locateIn("/proc/self/mountinfo", path)
	return onHost, err == nil && here != onHost, err
}

func locateIn(mounts, path string) (string, error) {
	f, err := os.Open(mounts)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return locate(f, path)
}

// locate returns the file system of a path, and the name that the path has in it, by the list of
// mounts of a process (proc_pid_mountinfo(5)).
func locate(list io.Reader, path string) (string, error) {
	all, err := mountinfo.Parse(list)
	if err != nil {
		return "", err
	}
	above := slices.DeleteFunc(all, func(m mountinfo.Mount) bool { return !rootdir.Within(path, m.Point) })
	// Follow the path from the root: of the mounts on a mount the first one on the way counts,
	// because it hides the deeper ones.
	var top mountinfo.Mount
	for _, m := range above {
		if m.Point == "/" {
			top = m
			break
		}
	}
	for next := (mountinfo.Mount{}); ; next = (mountinfo.Mount{}) {
		for _, m := range above {
			if m.Parent == top.ID && m.ID != top.ID && (next.ID == "" || len(m.Point) < len(next.Point)) {
				next = m
			}
		}
		if next.ID == "" {
			rest, err := filepath.Rel(top.Point, path)
			return top.Device + " " + filepath.Join(top.Root, rest), err
		}
		top = next
	}
}
