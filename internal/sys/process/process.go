// Package process identifies processes by descriptors, which a reused pid does not affect, and
// waits for their ends without a thread (pidfd_open(2)).
package process

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
)

// Peer returns a pidfd of the process that connected an accepted socket. The File is readable
// once that process has ended (pidfd_open(2)), and can be waited for without a thread.
func Peer(c syscall.Conn) (*os.File, error) {
	var pidfd int
	err := unixsock.Control(c, func(fd int) (err error) {
		pidfd, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
		if err == unix.ENOPROTOOPT { // before Linux 6.5
			pidfd, err = openPeer(fd)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("cannot open a pidfd of the peer: %w", err)
	}
	return Take(pidfd)
}

// openPeer opens a pidfd of the peer by its pid. Another process can have the pid if the peer has
// ended. But the kernel closes the files of a process before it frees the pid, so as long as the
// connection is open afterwards, it is the peer. Only a peer that passed the connection to another
// process is not covered.
func openPeer(fd int) (pidfd int, err error) {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return -1, err
	}
	if cred.Pid == 0 {
		return -1, errors.New("it is in a pid namespace that is not visible here")
	}
	pidfd, err = unix.PidfdOpen(int(cred.Pid), 0)
	if err != nil {
		return -1, err
	}
	state := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(state, 0)
	if err == nil && n > 0 {
		err = errors.New("it has closed the connection")
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(pidfd))
	}
	return pidfd, nil
}

// Copy returns a copy of a pidfd that can be waited for without a thread, however f was used
// before. It is an error if f is not a pidfd.
func Copy(f *os.File) (*os.File, error) {
	var pidfd int
	err := unixsock.Control(f, func(fd int) (err error) {
		if unix.PidfdSendSignal(fd, 0, nil, 0) == unix.EBADF {
			return errors.New("it is not a pidfd")
		}
		pidfd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	return Take(pidfd)
}

// Open returns a pidfd of the process with a pid. It needs Linux 5.3.
func Open(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ENOSYS) {
		return nil, fmt.Errorf("cannot watch process %d: this needs Linux 5.3 or later", pid)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot watch process %d: %w", pid, err)
	}
	return Take(fd)
}

// Take returns a File for a pidfd, which it owns.
func Take(pidfd int) (*os.File, error) {
	// os.NewFile uses the netpoller for nonblocking descriptors only.
	if err := unix.SetNonblock(pidfd, true); err != nil {
		return nil, errors.Join(err, unix.Close(pidfd))
	}
	return os.NewFile(uintptr(pidfd), "pidfd"), nil
}

// AwaitEnd waits until the process of a pidfd has ended. It is an error if the File was closed
// before that.
func AwaitEnd(pidfd *os.File) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(hasEnded)
}

// HasEnded reports whether the process of a pidfd has ended; false if the File is closed.
func HasEnded(pidfd *os.File) bool {
	ended := false
	_ = unixsock.Control(pidfd, func(fd int) error {
		ended = hasEnded(uintptr(fd))
		return nil
	})
	return ended
}

func hasEnded(pidfd uintptr) bool {
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0) // 0 after an error
	return n > 0
}
