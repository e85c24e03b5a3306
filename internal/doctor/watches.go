package doctor

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// watching tells whether a process follows a folder.
type watching int

const (
	unknown   watching = iota // it cannot be told
	nowhere                   // it has no inotify watch at all
	elsewhere                 // it has some, none of them on that folder
	follows                   // one is on that very folder
)

// watches looks for the folder among the inotify watches of a process
// (/proc/PID/fdinfo, proc(5)). That needs root.
//
// The kernel prints the number of the file system as it has it inside, which on btrfs and
// overlayfs is not the one that stat tells: there the inode alone must do.
func watches(proc string, pid int, folder string) (watching, error) {
	var st unix.Stat_t
	if err := unix.Stat(folder, &st); err != nil {
		return unknown, &fs.PathError{Op: "stat", Path: folder, Err: err}
	}
	inode := strconv.FormatUint(st.Ino, 16)
	device := strconv.FormatUint(uint64(unix.Major(st.Dev))<<20|uint64(unix.Minor(st.Dev)), 16)
	anyDevice := ownDeviceNumbers(folder)

	dir := filepath.Join(proc, strconv.Itoa(pid), "fdinfo")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return unknown, err
	}
	answer := nowhere
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed meanwhile
		}
		if err != nil {
			return unknown, err
		}
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			fields := strings.Fields(lines.Text())
			if len(fields) == 0 || fields[0] != "inotify" {
				continue
			}
			answer = max(answer, elsewhere)
			var ino, dev string
			for _, field := range fields {
				if v, ok := strings.CutPrefix(field, "ino:"); ok {
					ino = v
				}
				if v, ok := strings.CutPrefix(field, "sdev:"); ok {
					dev = v
				}
			}
			if ino == inode && (dev == device || anyDevice) {
				f.Close()
				return follows, nil
			}
		}
		err = lines.Err()
		f.Close()
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOENT) {
			return unknown, err
		}
	}
	return answer, nil
}

// ownDeviceNumbers tells whether the file system shows other device numbers than it has.
func ownDeviceNumbers(folder string) bool {
	var st unix.Statfs_t
	if unix.Statfs(folder, &st) != nil {
		return false
	}
	kind := uint32(st.Type) // its type differs between architectures
	return kind == unix.BTRFS_SUPER_MAGIC || kind == unix.OVERLAYFS_SUPER_MAGIC
}
