package kubelet

import (
	"os"

	"golang.org/x/sys/unix"
)

// fileID tells a file from every other that is, or was, at its path. Device and inode
// alone do while something holds the inode, as an open listener does with the file it
// is bound to; afterwards file systems (ext4) give the number to the next file made. The
// time of birth tells those apart; it is 0 on file systems that keep none.
type fileID struct {
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
	Born int64  `json:"born,omitzero"` // nanoseconds since 1970
}

// file is a look at a file.
type file struct {
	fileID
	mode    uint16
	changed int64 // ctime in nanoseconds
}

// oneMount tells whether a file can be moved from one folder to the other: not between
// mounts, also of one file system, nor between subvolumes, which differ in their device.
// False where it cannot be told (Linux before 5.8).
func oneMount(a, b string) bool {
	mountOf := func(path string) (st unix.Statx_t, known bool) {
		err := unix.Statx(unix.AT_FDCWD, path, unix.AT_NO_AUTOMOUNT, unix.STATX_MNT_ID, &st)
		return st, err == nil && st.Mask&unix.STATX_MNT_ID != 0
	}
	x, xKnown := mountOf(a)
	y, yKnown := mountOf(b)
	return xKnown && yKnown && x.Mnt_id == y.Mnt_id && x.Dev_major == y.Dev_major && x.Dev_minor == y.Dev_minor
}

func (f file) isSocket() bool { return f.mode&unix.S_IFMT == unix.S_IFSOCK }
func (f file) isDir() bool    { return f.mode&unix.S_IFMT == unix.S_IFDIR }

// kind names what it is, for people.
func (f file) kind() string {
	switch f.mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		return "a socket"
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFREG:
		return "a regular file"
	default:
		return "a special file"
	}
}

// lookAt looks at the file itself, also where it is a symbolic link.
func lookAt(path string) (file, error) { return statx(path, unix.AT_SYMLINK_NOFOLLOW) }

// lookThrough follows symbolic links.
func lookThrough(path string) (file, error) { return statx(path, 0) }

func statx(path string, flags int) (file, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, flags|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	if err != nil {
		return file{}, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	f := file{
		fileID:  fileID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino},
		mode:    st.Mode,
		changed: st.Ctime.Sec*1e9 + int64(st.Ctime.Nsec),
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		f.Born = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return f, nil
}
