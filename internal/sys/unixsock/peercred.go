// Package unixsock creates, replaces, probes and identifies Unix sockets and their files, and
// returns the process at the other end of a connection.
package unixsock

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/rate"
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

// ClientPrefix is the prefix of the abstract addresses that csi-registrar's own clients bind to, so
// that another csi-registrar at the other end does not mistake them for the kubelet.
const ClientPrefix = "@csi-registrar-"

// Dial connects to path from an abstract address that begins with ClientPrefix and cannot be
// guessed.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	local := &net.UnixAddr{Net: "unix", Name: ClientPrefix + rand.Text()}
	return new(net.Dialer).DialUnix(ctx, "unix", local, &net.UnixAddr{Net: "unix", Name: path})
}

// staleFor is the age from which a socket that refuses connections is stale: before that, the
// program that has bound it may be about to listen. On two busy cores 127 ms were seen between the
// two calls.
const staleFor = 250 * time.Millisecond

// InUse is the error for a path at which there is something other than a stale socket.
type InUse struct {
	Path   string
	Holder string // the kind of file, or the process that listens, for messages
	Live   bool   // somebody listens
	PID    int    // the process that listens; 0: not known
}

func (e *InUse) Error() string { return e.Path + " is held by " + e.Holder }

// Vacate removes the stale socket at path, and reports whether it did. The error is an *InUse if
// something else is there; nothing at path is no error. A stale socket refuses two connections, the
// second one when it is at least staleFor old, and is the same file both times. So after a power
// cut it takes no time, and otherwise staleFor at most.
func Vacate(ctx context.Context, path string) (removed bool, err error) {
	f, err := refuses(ctx, path)
	if err == nil && rate.Pause(ctx, untilStale(f, time.Now())) {
		removed, err = removeStale(ctx, path, f)
	}
	switch {
	case ctx.Err() != nil && !removed:
		return false, context.Cause(ctx)
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	}
	return removed, err
}

// removeStale removes the socket at path if it is still the same file, and refuses a connection.
// The time of change counts too: a new socket can have the inode number of the old one.
func removeStale(ctx context.Context, path string, before File) (removed bool, err error) {
	f, err := refuses(ctx, path)
	if err == nil && f != before {
		err = &InUse{Path: path, Holder: "a socket that was just replaced"}
	}
	if err != nil {
		return false, err
	}
	if removed, err = Remove(path, f.FileID); err != nil {
		err = fmt.Errorf("cannot remove the stale socket: %w", err)
	}
	return removed, err
}

// refuses returns the file at path if it is a socket that refuses connections; the error is an
// *InUse if something else is there.
func refuses(ctx context.Context, path string) (File, error) {
	f, err := Lstat(path)
	if err != nil {
		return f, err
	}
	if !f.IsSocket() {
		return f, &InUse{Path: path, Holder: f.Kind()}
	}
	var peer Cred
	c, err := Dial(ctx, path)
	if err == nil {
		defer c.Close()
		peer, err = PeerCred(c)
	}
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN): // EAGAIN: its queue is full
		return f, &InUse{Path: path, Holder: peer.String(), Live: true, PID: peer.PID}
	case errors.Is(err, unix.ECONNREFUSED):
		return f, nil
	case errors.Is(err, os.ErrNotExist):
		return f, err
	}
	return f, &InUse{Path: path, Holder: fmt.Sprintf("a socket that cannot be probed (%v)", err)}
}

// untilStale returns how long it takes until the file is old enough. A file with a time in the
// future, because the clock was set back, counts as new.
func untilStale(f File, now time.Time) time.Duration {
	return min(staleFor, staleFor-now.Sub(time.Unix(0, f.Changed)))
}
