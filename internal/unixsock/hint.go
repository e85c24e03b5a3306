package unixsock

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// Hint says what to do where an error of a socket, or of its file, says that the daemon or the
// node is out of something. It is put right after the error: it begins with "; ", and is empty
// for any other error.
func Hint(err error) string {
	for _, h := range []struct {
		errno syscall.Errno
		text  string
	}{
		{unix.EMFILE, "raise LimitNOFILE= of csi-registrar.service"},
		{unix.ENFILE, "the node has no file descriptors left: raise the sysctl fs.file-max"},
		{unix.ENOMEM, "the node is short of memory"},
		{unix.ENOBUFS, "the node is short of memory"},
		{unix.ENOSPC, "free space or inodes of that file system, or raise the sysctl fs.epoll.max_user_watches"},
		{unix.EDQUOT, "free space or inodes of that file system"},
		{unix.EROFS, "it is read-only for the daemon: mount it writable, and for another root_dir add it to ReadWritePaths= of the unit"},
	} {
		if errors.Is(err, h.errno) {
			return "; " + h.text
		}
	}
	return ""
}
