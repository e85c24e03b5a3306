package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

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
	anyDevice := ownDeviceNumbers(dir)

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

// ownDeviceNumbers reports whether stat returns other device numbers than the kernel uses
// internally.
func ownDeviceNumbers(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	kind := uint32(st.Type) // its type differs between architectures
	return kind == unix.BTRFS_SUPER_MAGIC || kind == unix.OVERLAYFS_SUPER_MAGIC
}
