package unixsock

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// FileID distinguishes a file from every other that is, or was, at its path. Device and inode are
// enough while something holds the inode, as an open listener holds the file that it is bound to;
// afterwards file systems (ext4) reuse the number for the next file. The time of birth
// distinguishes those; it is 0 on file systems that do not record it.
type FileID struct {
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
	Born int64  `json:"born,omitzero"` // nanoseconds since 1970
}

// File describes the file at a path.
type File struct {
	FileID
	Mode     uint16 // type and permission bits, as in stat(2)
	UID, GID uint32
	Changed  int64 // ctime in nanoseconds
}

// IsSocket reports whether it is a socket.
func (f File) IsSocket() bool { return f.Mode&unix.S_IFMT == unix.S_IFSOCK }

// IsDir reports whether it is a directory.
func (f File) IsDir() bool { return f.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsLink reports whether it is a symbolic link.
func (f File) IsLink() bool { return f.Mode&unix.S_IFMT == unix.S_IFLNK }

// IsRegular reports whether it is a regular file.
func (f File) IsRegular() bool { return f.Mode&unix.S_IFMT == unix.S_IFREG }

// Kind describes the type of the file for people: "a socket", "a directory".
func (f File) Kind() string {
	switch f.Mode & unix.S_IFMT {
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

// Lstat describes the file at path, without following a symbolic link. Like Stat it blocks for as
// long as the file system does not answer: call it from a goroutine that may block.
func Lstat(path string) (File, error) { return statx(path, unix.AT_SYMLINK_NOFOLLOW) }

// Stat is Lstat, but follows symbolic links. A directory on overlayfs is without its time of birth,
// which changes when the directory is copied up, that is at the first change in it.
func Stat(path string) (File, error) {
	f, err := statx(path, 0)
	if err != nil || !f.IsDir() {
		return f, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return File{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	if fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		f.Born = 0
	}
	return f, nil
}

func statx(path string, flags int) (File, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, flags|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	if err != nil {
		return File{}, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	f := File{
		FileID:  FileID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino},
		Mode:    st.Mode,
		UID:     st.Uid,
		GID:     st.Gid,
		Changed: st.Ctime.Sec*1e9 + int64(st.Ctime.Nsec),
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		f.Born = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return f, nil
}

// Remove unlinks the file at path if it is the given one, and reports whether it did.
//
// No system call unlinks a path only if it is a certain inode: between statx and unlink another
// file could be put there. The window is two system calls long, and only root can write in the
// directories that this is used for. A rename to another name first would close it, but the
// kubelet does not notice a rename, so that would not withdraw a socket.
func Remove(path string, id FileID) (bool, error) {
	f, err := Lstat(path)
	if err == nil && f.FileID == id {
		err = os.Remove(path)
	}
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && f.FileID == id, err
}
