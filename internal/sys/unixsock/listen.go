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
// be changed. Closing the listener leaves the file: see Remove.
func Listen(ctx context.Context, path string) (*net.UnixListener, File, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var chmodErr error
		if err := raw.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return chmodErr
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, File{}, err
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	f, err := Lstat(path)
	if err == nil && f.Mode&0o777 != 0o600 {
		err = os.Chmod(path, 0o600) // the umask also restricts the owner
	}
	if err != nil {
		return nil, File{}, errors.Join(err, ul.Close(), os.Remove(path))
	}
	return ul, f, nil
}
