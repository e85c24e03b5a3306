package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/cgroup"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

const (
	// lookLimit limits what takes microseconds unless a file system hangs.
	lookLimit = time.Second

	// bind comes before listen, which causes no event: a socket that was first seen less than young
	// ago and refuses connections is dialed again when it is twice as old, at the latest after
	// againMost.
	young      = 10 * time.Second
	againFirst = time.Millisecond
	againMost  = time.Second
)

// interrupted ends a query without a result: the driver's socket was replaced meanwhile, or nobody
// waits for it any more.
var interrupted = finding{reason: "the query was interrupted"}

// target is a path to look at, and the slot for the calls about it.
type target struct {
	path string
	slot *worker.Slot
}

// look examines the files at the paths of the socket and the endpoint, and whether they can be
// trusted.
func (c *Client) look(ctx context.Context) (socket, endpoint unixsock.File, f finding) {
	if err := unixsock.CheckPath(c.cfg.Socket); err != nil {
		return socket, endpoint, finding{status.Absent, err.Error() + ": move the driver's socket"}
	}
	s := c.lookAt(ctx, c.socket, false)
	if s.state != status.Starting && s.file.FileID != c.seen {
		c.seen, c.seenSince = s.file.FileID, time.Now()
	}
	if !s.ok() || c.cfg.Endpoint == c.cfg.Socket {
		return s.file, endpoint, s.finding
	}
	e := c.lookAt(ctx, c.endpoint, false)
	if e.state == status.Absent || errors.Is(e.err, unix.EACCES) { // the driver may see it
		e.finding = finding{}
	}
	return s.file, e.file, e.finding
}

// lookResult is the file at a path and why it cannot be used. If the look was to connect, raw is
// the connection to a trusted listener.
type lookResult struct {
	finding
	file   unixsock.File
	raw    *net.UnixConn
	server status.Server // the process that listens
	err    error         // of stat or of connect
}

func (l lookResult) discard() {
	if l.raw != nil {
		l.raw.Close()
	}
}

// lookAt is lookOnce, but does not wait for a file system that hangs.
func (c *Client) lookAt(ctx context.Context, at target, connect bool) lookResult {
	l, err := worker.Do(ctx, at.slot, c.lookLimit, func() lookResult { return lookOnce(c.cfg.SocketOwner, at.path, connect) }, lookResult.discard)
	if err != nil {
		l.finding = finding{status.Starting, err.Error()}
	}
	if c.cfg.OwnerUnknown && l.state == status.Mismatch {
		l.state = status.Starting // a mismatch would withdraw the registration
	}
	if ctx.Err() != nil {
		l.discard()
		l = lookResult{finding: interrupted}
	}
	return l
}

// lookOnce blocks for as long as a file system on the way does not answer. If the file is replaced
// between stat and connect, the next look finds that the FileID differs.
func lookOnce(owner trust.SocketOwner, path string, connect bool) (l lookResult) {
	if l.file, l.err = unixsock.Stat(path); l.err != nil {
		l.finding = missing(path, l.err)
		return l
	}
	if l.finding = untrusted(owner.Path(path)); !l.ok() || !connect {
		return l
	}
	raw, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		l.finding, l.err = refused(path, l.file, err), err
		return l
	}
	peer, err := unixsock.PeerCred(raw)
	if err == nil {
		err = owner.Listener(path, peer)
	}
	if l.finding = untrusted(err); !l.ok() {
		raw.Close()
		return l
	}
	l.raw, l.server = raw, cgroup.Server("/proc", peer.PID)
	return l
}

// moved reports whether the socket that t was connected to is no longer at the path. False if that
// cannot be determined.
func (c *Client) moved(ctx context.Context, t *conn) bool {
	l := c.lookAt(ctx, t.target, false)
	return l.state != status.Starting && l.file.FileID != t.file.FileID
}

// missing describes the first name on the path that does not exist. With any other error the state
// of the driver is not known, so it is Starting: it is asked again soon, and keeps its
// registration.
func missing(path string, err error) finding {
	switch {
	case errors.Is(err, unix.ENOENT):
		what := "there is nothing at " + path + ": the driver does not run, or listens elsewhere"
		if _, err := unixsock.Lstat(path); err == nil {
			what = path + " is a symbolic link to nothing: the driver does not run, or listens elsewhere"
		}
		for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
			if _, err := unixsock.Stat(dir); !errors.Is(err, unix.ENOENT) {
				return finding{status.Absent, what}
			}
			what = "the directory " + dir + " does not exist: the driver does not run, or listens elsewhere"
		}
	case errors.Is(err, unix.ENOTDIR):
		return finding{status.Absent, fmt.Sprintf("something on the way to %s is not a directory", path)}
	case errors.Is(err, unix.EACCES):
		return finding{status.Starting, fmt.Sprintf("no permission to look at %s: a directory on the way is closed to uid %d; see CAP_DAC_OVERRIDE in csi-registrar.service(8)", path, os.Geteuid())}
	}
	return finding{status.Starting, fmt.Sprintf("cannot check whether the driver is there: %v%s", err, unixsock.Hint(err))}
}

// refused describes why connecting to the file at path failed.
func refused(path string, file unixsock.File, err error) finding {
	switch {
	case !file.IsSocket():
		return finding{status.Absent, fmt.Sprintf("%s is %s, not a socket: fix the driver's socket path, or remove it", path, file.Kind())}
	case errors.Is(err, unix.ECONNREFUSED):
		return finding{status.Absent, "the connection to " + path + " is refused: the socket is there, but nobody listens; the driver ended, or does not listen yet"}
	case errors.Is(err, unix.ENOENT):
		return missing(path, err)
	case errors.Is(err, unix.EACCES):
		return finding{status.Absent, fmt.Sprintf("no permission to connect to %s as uid %d: its mode or a directory on the way forbids it; see CAP_DAC_OVERRIDE in csi-registrar.service(8)", path, os.Geteuid())}
	case errors.Is(err, unix.EPROTOTYPE):
		return finding{status.Absent, path + " is a socket, but not a stream socket as gRPC needs"}
	case errors.Is(err, unix.EAGAIN):
		return finding{status.Starting, "the driver does not accept connections: the queue of " + path + " is full"}
	}
	if hint := unixsock.Hint(err); hint != "" { // the fault is not the driver's
		return finding{status.Starting, fmt.Sprintf("cannot connect to the driver: %v%s", err, hint)}
	}
	return finding{status.Absent, fmt.Sprintf("cannot connect to %s: %v", path, err)}
}

// untrusted returns the finding for an error of trust.SocketOwner. If the check failed, the driver
// is Starting: a mismatch would withdraw its registration.
func untrusted(err error) finding {
	if err == nil {
		return finding{}
	}
	e, distrusted := errors.AsType[*trust.Error](err)
	if !distrusted {
		return finding{status.Starting, err.Error()}
	}
	var fixes string
	if e.Command.Name != "" {
		fixes = fmt.Sprintf(`run "%s", or `, e.Command)
	}
	if e.Owner != "" {
		fixes += fmt.Sprintf("set socket_owner = %q if that user runs the driver, or ", e.Owner)
	}
	return finding{status.Mismatch, fmt.Sprintf(`%v, so another user could pose as the driver: %sset socket_owner = "any" to turn these checks off`, e, fixes)}
}
