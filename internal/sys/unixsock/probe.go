package unixsock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
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
// program that has bound it may be about to listen.
const staleFor = 100 * time.Millisecond

// RemoveStale removes those of the paths that are stale sockets, and returns them. A stale socket
// refuses two connections, the second one when all of them are at least 100 ms old, and is the same
// file both times. So after a power cut it takes no time, and otherwise 100 ms at most.
func RemoveStale(ctx context.Context, paths []string) (removed []string, err error) {
	before := staleAmong(ctx, paths)
	if len(before) == 0 {
		return nil, nil
	}
	select {
	case <-time.After(untilStale(before, time.Now())):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return removeUnchanged(ctx, before)
}

// InUse is the error for a path at which there is something other than a stale socket.
type InUse struct {
	Path   string
	Holder string // the kind of file, or the process that listens, for messages
	Live   bool   // somebody listens
}

func (e *InUse) Error() string { return e.Path + " is held by " + e.Holder }

// Vacate removes the stale socket at path, as RemoveStale does, and reports whether it did. The
// error is an *InUse if something else is there; nothing at path is no error.
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
	paths, err := RemoveStale(ctx, []string{path})
	if err != nil {
		return false, fmt.Errorf("cannot remove the stale socket: %w", err)
	}
	removed = len(paths) > 0
	switch found, peer, err := Probe(ctx, path); {
	case ctx.Err() != nil:
		return removed, context.Cause(ctx)
	case err != nil:
		return removed, &InUse{Path: path, Holder: fmt.Sprintf("a socket that cannot be probed (%v)", err)}
	case found == Stale:
		return removed, &InUse{Path: path, Holder: "a socket that was just replaced"}
	case found == Live:
		return removed, &InUse{Path: path, Holder: peer.String(), Live: true}
	}
	return removed, nil
}

// untilStale returns how long it takes until all files are old enough. A file with a time in the
// future, because the clock was set back, counts as new.
func untilStale(files map[string]File, now time.Time) (d time.Duration) {
	for _, f := range files {
		d = max(d, staleFor-now.Sub(time.Unix(0, f.Changed)))
	}
	return min(d, staleFor)
}

// removeUnchanged removes those of the sockets that are still stale and unchanged.
func removeUnchanged(ctx context.Context, before map[string]File) (removed []string, err error) {
	var errs []error
	for path, f := range staleAmong(ctx, slices.Collect(maps.Keys(before))) {
		// The time of change counts too: a new socket can have the inode number of the old one.
		if f != before[path] {
			continue
		}
		did, err := Remove(path, f.FileID)
		if did {
			removed = append(removed, path)
		}
		errs = append(errs, err)
	}
	slices.Sort(removed)
	return removed, errors.Join(errs...)
}

// staleAmong returns those of the paths that are sockets that refuse connections.
func staleAmong(ctx context.Context, paths []string) map[string]File {
	found := make(map[string]File)
	for _, path := range paths {
		f, err := Lstat(path)
		if err != nil || !f.IsSocket() {
			continue
		}
		if live, _, err := Probe(ctx, path); err == nil && live == Stale {
			found[path] = f
		}
	}
	return found
}
