package daemon

import (
	"io"
	"os"
	"path/filepath"
	"slices"

	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/node/volumes"
)

// hostMounts has the mounts that the kubelet and systemd see. Those of the sandbox are copies:
// mounts on the host propagate to them, except over or below a mount of the sandbox's own.
const hostMounts = "/proc/1/mountinfo"

// hiddenFromHost reports whether the host has another directory at a path than this process. It
// blocks for as long as the file system does not answer.
func hiddenFromHost(path string) (bool, error) {
	path, err := filepath.EvalSymlinks(path) // as in mountinfo
	if err != nil {
		return false, err
	}
	var seen [2]string
	for i, file := range []string{"/proc/self/mountinfo", hostMounts} {
		f, err := os.Open(file)
		if err != nil {
			return false, err
		}
		seen[i], err = locate(f, path)
		if f.Close(); err != nil {
			return false, err
		}
	}
	return seen[0] != seen[1], nil
}

// locate returns the file system of a path, and the name that the path has in it, by the list of
// mounts of a process (proc_pid_mountinfo(5)).
func locate(mountinfo io.Reader, path string) (string, error) {
	all, err := volumes.ParseMounts(mountinfo)
	if err != nil {
		return "", err
	}
	above := slices.DeleteFunc(all, func(m volumes.Mount) bool { return !systemd.Within(path, m.Point) })
	// Follow the path from the root: of the mounts on a mount the first one on the way counts,
	// because it hides the deeper ones.
	var top volumes.Mount
	for _, m := range above {
		if m.Point == "/" {
			top = m
			break
		}
	}
	for next := (volumes.Mount{}); ; next = (volumes.Mount{}) {
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
