// Package cgroup finds out which unit, pod and container a process belongs to.
package cgroup

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// maxSize limits how much of /proc/PID/cgroup is read. A process can make it long if a part of the
// hierarchy is delegated to it.
const maxSize = 64 << 10

// Server returns the unit, pod and container, from proc (a directory like /proc), of a process that
// listens on a socket. It is zero for PID 1, which only keeps the socket for another process, and
// for a process that is not visible.
func Server(proc string, pid int) status.Server {
	if pid <= 1 {
		return status.Server{}
	}
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return status.Server{}
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSize))
	if err != nil {
		return status.Server{}
	}
	p := Parse(string(text))
	return status.Server{PID: pid, Unit: safetext.Claim(p.Unit), Pod: safetext.Claim(p.Pod), Container: safetext.Claim(p.Container)}
}

var (
	// The kubelet names the cgroup of a pod after its UID (v1.36, pkg/kubelet/cm): with systemd as
	// driver its dashes are underscores. A static pod's UID is a hash.
	podName = regexp.MustCompile(`(?:^|-)pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$`)
	// containerd and CRI-O name the cgroup of a container after its ID.
	containerName = regexp.MustCompile(`^(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?$`)
)

// Place is where a process runs. Its strings have the form of what they name.
type Place struct {
	Unit, Pod, Container string
}

// Parse parses /proc/PID/cgroup. The unit is the first unit in the path, because other users may
// choose the names below it; it is empty for a process of a pod. For a process of a user's own
// service manager the result is zero.
func Parse(text string) (s Place) {
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 || (fields[1] != "" && fields[1] != "name=systemd") {
			continue
		}
		for part := range strings.SplitSeq(fields[2], "/") {
			switch pod, container := podName.FindStringSubmatch(part), containerName.FindStringSubmatch(part); {
			case strings.HasPrefix(part, "user@"):
				return Place{}
			case s.Pod == "" && pod != nil:
				s.Unit, s.Pod = "", strings.ReplaceAll(pod[1], "_", "-")
			case s.Pod != "" && container != nil:
				s.Container = container[1]
				return s
			case s.Pod == "" && s.Unit == "" && (strings.HasSuffix(part, ".service") || strings.HasSuffix(part, ".scope")):
				if !safetext.UnitName(part) {
					return Place{}
				}
				s.Unit = part
			}
		}
		if s != (Place{}) {
			return s
		}
	}
	return s
}

// InPod reports whether a process with this /proc/PID/cgroup runs below a kubelet's cgroup for
// pods, even if Parse cannot find the pod.
func InPod(text string) bool {
	return strings.Contains(text, "kubepods") || Parse(text).Pod != ""
}
