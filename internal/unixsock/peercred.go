// Package unixsock holds what every user of a Unix socket here needs.
package unixsock

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Cred is a process as the kernel saw it when the connection was made.
type Cred struct {
	// PID is 0 if the process lives in a pid namespace that is not seen from here. It may
	// have ended since, and its number may be another's by now: good for a log line, not
	// for a decision.
	PID int
	// UID is the effective one; the kernel's overflow id (65534) if the user does not exist in
	// our user namespace.
	UID uint32
}

// String is for log lines and reasons.
func (c Cred) String() string {
	if c.PID == 0 {
		return fmt.Sprintf("a process of uid %d", c.UID)
	}
	return fmt.Sprintf("process %d (uid %d)", c.PID, c.UID)
}

// PeerCred reads SO_PEERCRED of a connected Unix socket (unix(7)).
//
// What it tells depends on the end. At the accepting end: who called connect(). At the
// connecting end: who called listen(), which need not be who accepts now: with socket
// activation it is systemd, and after a descriptor was handed over it is the first owner.
// Neither end can change it afterwards, and a later change of the process's ids, or of
// the socket file's owner, does not show.
//
// The descriptor is read through SyscallConn: File().Fd() would make it blocking, for its
// owner too.
func PeerCred(c syscall.Conn) (Cred, error) {
	var (
		ucred   *unix.Ucred
		readErr error
	)
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			ucred, readErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		})
	}
	if err != nil { // closed meanwhile
		return Cred{}, fmt.Errorf("cannot reach the socket's descriptor: %w", err)
	}
	if readErr != nil {
		return Cred{}, fmt.Errorf("cannot read the peer's credentials: %w", readErr)
	}
	return Cred{PID: int(ucred.Pid), UID: ucred.Uid}, nil
}
