// Package mountinfo reads the list of mounts of a process (proc_pid_mountinfo(5)).
package mountinfo

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxSize limits how much of a file is read.
const maxSize = 64 << 20

// Mount is a line of mountinfo. Shared is the peer group of the mount, to whose members every mount
// and unmount below it propagates; Master is the group from which it receives them. They are empty
// if there is none.
type Mount struct{ ID, Parent, Device, Root, Point, Shared, Master, Type, Source string }

// Read returns the mounts that a process sees, in the order in which they were made. The process
// is "self" or a pid, and proc is the path of /proc.
func Read(proc, process string) ([]Mount, error) {
	f, err := os.Open(filepath.Join(proc, process, "mountinfo"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Parse(f)
}

// Parse returns the mounts in a mountinfo file.
func Parse(mountinfo io.Reader) ([]Mount, error) {
	text, err := io.ReadAll(io.LimitReader(mountinfo, maxSize))
	var all []Mount
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if ok && len(fields) >= 6 && len(rest) >= 2 {
			m := Mount{ID: fields[0], Parent: fields[1], Device: fields[2], Root: unescape.Replace(fields[3]), Point: unescape.Replace(fields[4]),
				Type: rest[0], Source: unescape.Replace(rest[1])}
			for _, optional := range fields[6:] {
				switch tag, group, _ := strings.Cut(optional, ":"); tag {
				case "shared":
					m.Shared = group
				case "master":
					m.Master = group
				}
			}
			all = append(all, m)
		}
	}
	return all, err
}

// unescape decodes the kernel's escapes of field separators.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

// View is a directory as a process sees it.
type View struct {
	dev, ino uint64
	// Mount is the mount that the directory is on.
	Mount Mount
}

// Look returns the view that a process has of a directory. It blocks for as long as the file system
// does not answer. The error wraps fs.ErrNotExist if the process has no such directory.
func Look(proc, process, dir string) (View, error) {
	fd, err := openIn(filepath.Join(proc, process, "root"), dir)
	if err != nil {
		return View{}, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return View{}, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	// Mount points do not identify the mount of a path: another mount can cover them.
	info, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return View{}, err
	}
	all, err := Read(proc, process)
	_, id, _ := strings.Cut(string(info), "mnt_id:")
	id, _, _ = strings.Cut(strings.TrimSpace(id), "\n")
	v := View{dev: uint64(st.Dev), ino: st.Ino, Mount: Mount{ID: id}}
	if i := slices.IndexFunc(all, func(m Mount) bool { return m.ID == id }); i >= 0 {
		v.Mount = all[i]
	}
	return v, err
}

// openIn opens a directory below a root directory, which is also where absolute links begin.
func openIn(root, dir string) (int, error) {
	top, err := unix.Open(root, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(top)
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	fd, err := unix.Openat2(top, dir, &unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_IN_ROOT})
	if err == unix.ENOSYS { // before Linux 5.6
		fd, err = unix.Openat(top, strings.TrimLeft(dir, "/"), flags, 0)
	}
	return fd, err
}

// Same reports whether both are the same directory, though perhaps by different mounts.
func (v View) Same(other View) bool { return v.dev == other.dev && v.ino == other.ino }

// Propagates reports whether a mount that the process of v makes below the directory appears there
// for the process of another view of the same directory. masters has the master of each peer group
// that has one; it is only called if the groups are connected by others.
func (v View) Propagates(to View, masters func() map[string]string) bool {
	group := v.Mount.Shared
	switch {
	case v.Mount.ID == to.Mount.ID: // a mount is in one namespace only
		return true
	case group == "":
		return false
	case group == to.Mount.Shared || group == to.Mount.Master:
		return true
	case to.Mount.Master == "":
		return false
	}
	all := masters()
	next := to.Mount.Master
	for range len(all) { // in a list that changes while it is read there could be a loop
		if next = all[next]; next == group {
			return true
		}
	}
	return false
}

// Namespaces returns a process of each mount namespace.
func Namespaces(proc string) []string {
	entries, _ := os.ReadDir(proc) // without any there is nothing to compare
	var found []string
	seen := map[string]bool{}
	for _, e := range entries {
		ns, err := os.Readlink(filepath.Join(proc, e.Name(), "ns/mnt"))
		if _, notNumber := strconv.Atoi(e.Name()); err == nil && notNumber == nil && !seen[ns] {
			seen[ns], found = true, append(found, e.Name())
		}
	}
	return found
}

// Masters returns the master of each peer group that has one, in all mount namespaces.
func Masters(proc string) map[string]string {
	all := map[string]string{}
	for _, process := range Namespaces(proc) {
		mounts, _ := Read(proc, process) // an error: it has ended
		for _, m := range mounts {
			if m.Shared != "" && m.Master != "" {
				all[m.Shared] = m.Master
			}
		}
	}
	return all
}
