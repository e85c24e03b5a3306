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

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

const (
	// lookLimit is for what takes microseconds unless a file system is dead.
	lookLimit = time.Second

	// bind comes before listen: a socket that appeared within fresh and refuses is tried
	// again after retryFirst, then twice that, up to retryMost, for retryFor in all.
	fresh      = 2 * time.Second
	retryFirst = 250 * time.Microsecond
	retryMost  = 4 * time.Millisecond
	retryFor   = time.Second

	// A driver may take longer: while its socket is young it is worth a look each second.
	young     = time.Minute
	lookAgain = time.Second
)

var interrupted = finding{status.Starting, "asking was interrupted"}

// view is what a look found at the paths of the socket and the endpoint.
type view struct{ socket, endpoint unixsock.File }

// look finds out what is at the paths, and whether it may be trusted.
func (c *Client) look(ctx context.Context) (view, finding) {
	var v view
	if err := unixsock.CheckPath(c.cfg.Socket); err != nil {
		return v, finding{status.Absent, err.Error() + ": move the driver's socket"}
	}
	file, f := c.lookAt(ctx, c.socketSlot, c.cfg.Socket)
	v.socket = file
	if f.state != status.Starting {
		c.seen.note(file.FileID)
	}
	if !f.ok() || c.cfg.Endpoint == c.cfg.Socket {
		return v, f
	}
	v.endpoint, f = c.lookAt(ctx, c.endpointSlot, c.cfg.Endpoint)
	if f.state == status.Absent {
		f = finding{} // a driver may see another file system than we do
	}
	return v, f
}

// lookAt looks at one path. Absent: there is nothing to be seen.
func (c *Client) lookAt(ctx context.Context, slot *worker.Slot, path string) (unixsock.File, finding) {
	type result struct {
		unixsock.File
		finding
	}
	r, err := worker.Do(ctx, slot, c.lookLimit, func() (r result) {
		if r.File, r.finding = stat(path); r.ok() {
			r.finding = untrusted(c.trust.Path(path))
		}
		return r
	}, nil)
	if err != nil {
		return unixsock.File{}, notLooked(ctx, err)
	}
	return r.File, r.finding
}

// moved reports whether another socket, or none, is now where t was connected to. False if
// that cannot be found out.
func (c *Client) moved(ctx context.Context, t *conn) bool {
	file, err := worker.Do(ctx, t.slot, c.lookLimit, func() unixsock.FileID {
		file, f := stat(t.path)
		if f.state == status.Starting {
			return t.file.FileID
		}
		return file.FileID
	}, nil)
	return err == nil && file != t.file.FileID
}

// note takes in which file was seen at the path.
func (s *sighting) note(file unixsock.FileID) {
	if s.since.IsZero() || file != s.file {
		s.changed = !s.since.IsZero()
		s.file, s.since = file, time.Now()
	}
}

// isFresh reports whether f was made or changed within d. The time of change is by the wall
// clock, which can be set in between.
func (c *Client) isFresh(f unixsock.File, d time.Duration) bool {
	return time.Since(time.Unix(0, f.Changed)).Abs() < d ||
		c.seen.changed && f.FileID == c.seen.file && time.Since(c.seen.since) < d
}

// notLooked is the finding where worker.Do failed.
func notLooked(ctx context.Context, err error) finding {
	if ctx.Err() != nil {
		return interrupted
	}
	return finding{status.Starting, err.Error()}
}

// stat follows links. It blocks for as long as the file system does not answer, as all below.
func stat(path string) (unixsock.File, finding) {
	file, err := unixsock.Stat(path)
	if err != nil {
		return unixsock.File{}, missing(path, err)
	}
	return file, finding{}
}

// dialed is what one attempt to connect gave: a connection, or why there is none.
type dialed struct {
	finding
	raw      *net.UnixConn
	file     unixsock.File
	retry    bool // it may be different in a moment
	replaced bool // because another file is at the path now
}

func (d dialed) discard() {
	if d.raw != nil {
		d.raw.Close()
	}
}

// dialOnce tries once to connect to the trusted listener at path.
func dialOnce(trust Trust, path string) (d dialed) {
	if d.file, d.finding = stat(path); !d.ok() {
		return d
	}
	raw, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		d.finding = refused(path, d.file, err)
		d.retry = errors.Is(err, unix.ECONNREFUSED) && d.file.IsSocket()
		return d
	}
	if now, f := stat(path); !f.ok() || now.FileID != d.file.FileID {
		raw.Close() // which one it is, nobody knows
		d.finding = finding{status.Absent, "the socket " + path + " is replaced again and again: do two drivers use the same path?"}
		d.retry, d.replaced = true, true
		return d
	}
	peer, err := unixsock.PeerCred(raw)
	if err != nil {
		d.finding = finding{status.Starting, err.Error()}
	} else {
		d.finding = untrusted(trust.Listener(path, peer))
	}
	if !d.ok() {
		raw.Close()
		return d
	}
	d.raw = raw
	return d
}

// missing says what is not there: the socket, or which directory on the way. Any other error
// says nothing about the driver, so it is Starting: it is asked again soon, and keeps its
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
	return finding{status.Starting, fmt.Sprintf("cannot look at %s: %v%s", path, cause(err), remedy(err))}
}

// cause leaves out the operation and path of a system call's error.
func cause(err error) error {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return err
}

// refused says why what is at path cannot be connected to.
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
	if why := remedy(err); why != "" {
		return finding{status.Starting, fmt.Sprintf("cannot connect to the driver: %v%s", err, why)}
	}
	return finding{status.Absent, fmt.Sprintf("cannot connect to %s: %v", path, err)}
}

// remedy tells what to do where an error says nothing of the driver, but that we, or the
// node, are out of something; empty for any other error.
func remedy(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "; raise LimitNOFILE= of csi-registrar.service"
	case errors.Is(err, unix.ENFILE):
		return "; the node has no file descriptors left: raise the sysctl fs.file-max"
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
		return "; the node is short of memory"
	case errors.Is(err, unix.ENOSPC):
		return "; raise the sysctl fs.epoll.max_user_watches"
	}
	return ""
}
