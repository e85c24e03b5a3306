package daemon

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strings"

	"csi-registrar/internal/systemd"
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
	type mount struct{ id, parent, device, root, point string }
	var above []mount // of path
	lines := bufio.NewScanner(mountinfo)
	for lines.Scan() {
		f := strings.SplitN(lines.Text(), " ", 6)
		if len(f) < 6 {
			continue
		}
		if point := unescape.Replace(f[4]); systemd.Within(path, point) {
			above = append(above, mount{f[0], f[1], f[2], unescape.Replace(f[3]), point})
		}
	}
	// Follow the path from the root: of the mounts on a mount the first one on the way counts,
	// because it hides the deeper ones.
	var top mount
	for _, m := range above {
		if m.point == "/" {
			top = m
			break
		}
	}
	for next := (mount{}); ; next = (mount{}) {
		for _, m := range above {
			if m.parent == top.id && m.id != top.id && (next.id == "" || len(m.point) < len(next.point)) {
				next = m
			}
		}
		if next.id == "" {
			rest, err := filepath.Rel(top.point, path)
			if err != nil {
				return "", err
			}
			return top.device + " " + filepath.Join(top.root, rest), lines.Err()
		}
		top = next
	}
}

// unescape decodes the kernel's escapes of field separators.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
