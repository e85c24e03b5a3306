package unixsock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ClientPrefix is the prefix of the abstract addresses that csi-registrar's own clients bind to, so
// that another csi-registrar at the other end does not mistake them for the kubelet.
const ClientPrefix = "@csi-registrar-"

// Dial connects to path from an abstract address that begins with ClientPrefix and cannot be
// guessed.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	d := net.Dialer{LocalAddr: &net.UnixAddr{Net: "unix", Name: ClientPrefix + rand.Text()}}
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// Liveness is the result of a probe.
type Liveness string

// Probe results.
const (
	Missing Liveness = "missing" // no file
	Stale   Liveness = "stale"   // a file without a listener
	Live    Liveness = "live"    // a listener
)

// Probe reports whether a process listens at path, and which one. After an error it is not known.
func Probe(ctx context.Context, path string) (Liveness, Cred, error) {
	c, err := Dial(ctx, path)
	switch {
	case err == nil:
		defer c.Close()
		cred, err := PeerCred(c)
		return Live, cred, err
	case errors.Is(err, os.ErrNotExist):
		return Missing, Cred{}, nil
	case errors.Is(err, unix.ECONNREFUSED):
		return Stale, Cred{}, nil
	case errors.Is(err, unix.EAGAIN): // its queue is full
		return Live, Cred{}, nil
	default:
		return Live, Cred{}, err
	}
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
	f, err := Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !f.IsSocket():
		return false, &InUse{Path: path, Holder: f.Kind()}
	}
	if found, peer, err := Probe(ctx, path); err != nil || found != Stale {
		return false, inUse(ctx, path, found, peer, err)
	}
	select {
	case <-time.After(untilStale(f, time.Now())):
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
	return removeStale(ctx, path, f)
}

// removeStale removes the socket at path if it is still the same file, and refuses a connection.
// The time of change counts too: a new socket can have the inode number of the old one.
func removeStale(ctx context.Context, path string, before File) (removed bool, err error) {
	f, err := Lstat(path)
	found, peer, probeErr := Probe(ctx, path)
	if err != nil || f != before || probeErr != nil || found != Stale {
		return false, inUse(ctx, path, found, peer, probeErr)
	}
	if removed, err = Remove(path, f.FileID); err != nil {
		err = fmt.Errorf("cannot remove the stale socket: %w", err)
	}
	return removed, err
}

// inUse returns the error for the result of a probe; nil if nothing is at path.
func inUse(ctx context.Context, path string, found Liveness, peer Cred, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return &InUse{Path: path, Holder: fmt.Sprintf("a socket that cannot be probed (%v)", err)}
	case found == Stale:
		return &InUse{Path: path, Holder: "a socket that was just replaced"}
	case found == Live:
		return &InUse{Path: path, Holder: peer.String(), Live: true, PID: peer.PID}
	}
	return nil
}

// untilStale returns how long it takes until the file is old enough. A file with a time in the
// future, because the clock was set back, counts as new.
func untilStale(f File, now time.Time) time.Duration {
	return min(staleFor, staleFor-now.Sub(time.Unix(0, f.Changed)))
}
