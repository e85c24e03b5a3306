// Package process identifies processes by descriptors, which a reused pid does not affect, and
// waits for their ends without a thread (pidfd_open(2)).
package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
)

// Peer returns the pid and a pidfd of the process that connected an accepted socket. The File is
// readable once that process has ended (pidfd_open(2)), and can be waited for without a thread.
//
// Another process can have the pid if the peer has ended. But the kernel closes the files of a
// process before it frees the pid, so as long as the connection is open afterwards, it is the peer.
// Only a peer that passed the connection to another process is not covered. SO_PEERPIDFD needs
// Linux 6.5.
func Peer(c syscall.Conn) (pid int, pidfd *os.File, err error) {
	cred, err := unixsock.PeerCred(c)
	if err == nil && cred.PID == 0 {
		err = errors.New("it is in a pid namespace that is not visible here")
	}
	if err != nil {
		return 0, nil, fmt.Errorf("cannot open a pidfd of the peer: %w", err)
	}
	if pidfd, err = Open(cred.PID); err != nil {
		return 0, nil, err
	}
	err = unixsock.Control(c, func(fd int) error {
		state := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(state, 0)
		for err == unix.EINTR { // also without waiting, before Linux 6.5
			n, err = unix.Poll(state, 0)
		}
		if err == nil && n > 0 {
			err = errors.New("the peer has closed the connection")
		}
		return err
	})
	if err != nil {
		return 0, nil, errors.Join(err, pidfd.Close())
	}
	return cred.PID, pidfd, nil
}

// Open returns a pidfd of the process with a pid.
func Open(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0)
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

// StartTime returns when a process started, in clock ticks since the boot: together with the pid it
// identifies the process. It is 0 if there is none in proc (a directory like /proc).
func StartTime(proc string, pid int) uint64 {
	stat, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	// The name, in parentheses, can contain anything (proc_pid_stat(5)); starttime is field 22.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return 0
	}
	ticks, _ := strconv.ParseUint(string(fields[19]), 10, 64) // the kernel's number
	return ticks
}
