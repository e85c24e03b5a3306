package unixsock

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Hint returns the fix for an error of a socket, or of its file, if the daemon or the node has run
// out of a resource. It is appended to the error: it begins with "; ", and is empty
// for any other error.
func Hint(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "; raise LimitNOFILE= of csi-registrar.service"
	case errors.Is(err, unix.ENFILE):
		return "; the node has no file descriptors left: raise the sysctl fs.file-max"
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
		return "; the node is short of memory"
	case errors.Is(err, unix.ENOSPC) && fromNetpoller(err):
		return "; raise the sysctl fs.epoll.max_user_watches"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return "; free space or inodes of that file system"
	case errors.Is(err, unix.EROFS):
		return "; it is read-only for the daemon: mount it writable, and for another root_dir add it to ReadWritePaths= of the unit"
	}
	return ""
}

// fromNetpoller reports whether a socket could not be added to Go's epoll instance: package net
// names the system call in every other error.
func fromNetpoller(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	if !ok {
		return false
	}
	_, ok = op.Err.(syscall.Errno)
	return ok
}
