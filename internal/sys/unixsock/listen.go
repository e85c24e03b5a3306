package unixsock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

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
