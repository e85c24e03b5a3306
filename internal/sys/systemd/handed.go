package systemd

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
)

// Receive returns the descriptors of LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES: sockets on which
// the service manager listens, and the contents of the descriptor store. It removes these
// variables, so that children do not use them. Name returns the name of each file; several may have
// one name. The order has no meaning: systemd changes it from one start to the next. There are none
// without the variables, or if they are for another process. Call it once, early.
//
// net.FileListener returns a listener for a copy of the descriptor: close the file afterwards.
// Never call Fd on a file of a listener that is in use: it makes the socket blocking for all
// processes that share it.
func Receive() []*os.File { return activation.Files(true) }

// ListenAddress returns the network ("unix" or "tcp") and the address that a descriptor was bound
// to, the latter empty for TCP. It is an error if the descriptor is not a stream socket that
// listens.
func ListenAddress(f syscall.Conn) (network, address string, err error) {
	err = unixsock.Control(f, func(fd int) error {
		network, address, err = listenAddress(fd)
		return err
	})
	return network, address, err
}

func listenAddress(fd int) (network, address string, err error) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return "", "", fmt.Errorf("not a socket: %w", err)
	}
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil || kind != unix.SOCK_STREAM || listens == 0 {
		return "", "", errors.Join(errors.New("not a listening stream socket"), err)
	}
	bound, err := unix.Getsockname(fd)
	switch bound := bound.(type) {
	case *unix.SockaddrUnix:
		return "unix", bound.Name, nil
	case *unix.SockaddrInet4, *unix.SockaddrInet6:
		return "tcp", "", nil
	}
	return "", "", errors.Join(errors.New("neither a Unix nor a TCP socket"), err)
}
