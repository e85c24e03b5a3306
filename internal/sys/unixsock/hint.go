package unixsock

import (
	"errors"

	"golang.org/x/sys/unix"
)

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
