// Package unixsock creates, replaces, probes and identifies Unix sockets and their files, and
// returns the process at the other end of a connection.
package unixsock

import (
	"cmp"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Cred identifies a process as of the time when it connected or listened.
type Cred struct {
	// PID is 0 if the process is in a pid namespace that is not visible here. The process may
	// have ended since, and another may have its pid: use it in log lines, not in decisions.
	PID int
	// UID and GID are the effective IDs; the kernel's overflow ID (65534) if the user or the group
	// does not exist in our user namespace.
	UID, GID uint32
}

// String describes the process in log lines and reasons.
func (c Cred) String() string {
	if c.PID == 0 {
		return fmt.Sprintf("a process of uid %d", c.UID)
	}
	return fmt.Sprintf("process %d (uid %d)", c.PID, c.UID)
}

// PeerCred reads SO_PEERCRED of a connected Unix socket (unix(7)).
//
// The accepting end gets the process that called connect, the connecting end the process that
// called listen. Another process may accept: with socket activation systemd called listen, and with
// a descriptor that was passed on its first owner did. Neither end can change it afterwards, and a
// later change of the process's user, or of the socket file's owner, does not show.
func PeerCred(c syscall.Conn) (Cred, error) {
	var ucred *unix.Ucred
	err := Control(c, func(fd int) (err error) {
		ucred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	if err != nil {
		return Cred{}, fmt.Errorf("cannot read the peer's credentials: %w", err)
	}
	return Cred{PID: int(ucred.Pid), UID: ucred.Uid, GID: ucred.Gid}, nil
}

// Control calls f with c's descriptor and returns its error; it is an error if c is closed. Unlike
// Fd, it does not make the descriptor blocking, which would affect all processes that share it.
func Control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Control(func(fd uintptr) { result = f(int(fd)) })
	return cmp.Or(err, result)
}
