package unixsock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

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
	kinds := map[uint16]string{
		unix.S_IFSOCK: "a socket", unix.S_IFDIR: "a directory",
		unix.S_IFLNK: "a symbolic link", unix.S_IFREG: "a regular file",
	}
	return cmp.Or(kinds[f.Mode&unix.S_IFMT], "a special file")
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

// MaxPath is the maximum length of the path of a Unix socket in bytes, without the final NUL
// (unix(7)).
const MaxPath = 107

// CheckPath returns an error if the path is too long for a Unix socket.
func CheckPath(path string) error {
	if len(path) > MaxPath {
		return fmt.Errorf("%s has %d bytes; the path of a Unix socket has at most %d", path, len(path), MaxPath)
	}
	return nil
}

// Listen returns a listening socket at path, and its file. The file has mode 0600 from the start:
// bind gives it the mode of the unbound socket, so the umask, which all goroutines share, need not
// be changed. The unit's filter forbids all calls that set a mode, and its umask makes it 0700,
// which is the same for a socket. Closing the listener leaves the file: see Remove.
//
// Unless before is nil, it is called with the socket that is not bound yet, and if it fails nothing
// is bound. Between bind and listen, and until its file is looked at, are a few system calls: see
// Remove. If the file was removed meanwhile, the File is zero.
func Listen(ctx context.Context, path string, before func(syscall.Conn) error) (*net.UnixListener, File, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		err := Control(unbound{raw}, func(fd int) error { return unix.Fchmod(fd, 0o600) })
		if errors.Is(err, unix.EPERM) {
			err = nil // the umask may do: see below
		}
		if err == nil && before != nil {
			err = before(unbound{raw})
		}
		return err
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, File{}, err
	}
	return complete(l.(*net.UnixListener), path)
}

// complete looks at the file of a listener that is bound to path.
func complete(ul *net.UnixListener, path string) (*net.UnixListener, File, error) {
	ul.SetUnlinkOnClose(false)
	f, err := Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist): // as if it was removed a moment later
		return ul, File{}, nil
	case err != nil:
	case !f.IsSocket(): // it was replaced at once
		err = &os.PathError{Op: "bind", Path: path, Err: unix.EADDRINUSE}
	case f.Mode&0o677 != 0o600: // the umask restricts the owner, too, or it lets others in
		if err = os.Chmod(path, 0o600); err != nil {
			_, rerr := Remove(path, f.FileID)
			err = errors.Join(err, rerr)
		}
	}
	if err != nil {
		return nil, File{}, errors.Join(err, ul.Close())
	}
	return ul, f, nil
}

// unbound is a socket that is not bound yet.
type unbound struct{ syscall.RawConn }

func (u unbound) SyscallConn() (syscall.RawConn, error) { return u.RawConn, nil }

// Cookie returns the kernel's number of a socket, which no other socket has or had since the boot
// (SO_COOKIE, unique in all network namespaces since Linux 5.4). All descriptors of the socket have
// it, in whatever process.
func Cookie(c syscall.Conn) (cookie uint64, err error) {
	err = Control(c, func(fd int) (err error) {
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		return os.NewSyscallError("getsockopt SO_COOKIE", err)
	})
	return cookie, err
}

// Hint returns the fix for an error of a socket, or of its file, if the daemon or the node has run
// out of a resource. It is appended to the error: it begins with "; ", and is empty for any other
// error.
func Hint(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "; raise LimitNOFILE= of csi-registrar.service"
	case errors.Is(err, unix.ENFILE):
		return "; the node has no file descriptors left: raise the sysctl fs.file-max"
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
		return "; the node is short of memory"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return "; free space or inodes of that file system"
	case errors.Is(err, unix.EROFS):
		return "; it is read-only for the daemon: mount it writable, and for another root_dir add it to ReadWritePaths= of the unit"
	}
	return ""
}
