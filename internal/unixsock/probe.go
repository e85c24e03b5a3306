package unixsock

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// ClientPrefix begins the abstract addresses that csi-registrar's own clients bind to, so
// that another csi-registrar at the other end does not take them for the kubelet.
const ClientPrefix = "@csi-registrar-"

// Dial connects to path from an abstract address of our own that nobody can guess. The error
// is the system's (errors.Is).
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	d := net.Dialer{LocalAddr: &net.UnixAddr{Net: "unix", Name: ClientPrefix + rand.Text()}}
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// Liveness is what a probe of a socket's path found.
type Liveness string

// What a probe finds.
const (
	Missing Liveness = "missing" // there is no file
	Stale   Liveness = "stale"   // there is a file, and nobody listens
	Live    Liveness = "live"    // somebody listens
)

// Probe reports whether somebody listens at path, and who. The error is set where it cannot
// be told.
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

// staleFor is the age at which a socket that refuses is stale: a program that has bound it is
// given the time to listen.
const staleFor = 100 * time.Millisecond

// RemoveStale removes those of the paths that are stale sockets: connection refused twice, the
// second time when all are at least 100 ms old, and the same file all the time. So it takes no
// time after a power cut, and 100 ms at most. It returns what it removed.
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

// untilStale returns how long it takes until all are old enough. A file of the future, made before the
// clock was set back, is as good as new.
func untilStale(files map[string]File, now time.Time) (d time.Duration) {
	for _, f := range files {
		d = max(d, staleFor-now.Sub(time.Unix(0, f.Changed)))
	}
	return min(d, staleFor)
}

// removeUnchanged removes the stale sockets that still are, and are the same.
func removeUnchanged(ctx context.Context, before map[string]File) (removed []string, err error) {
	var errs []error
	for path, f := range staleAmong(ctx, slices.Collect(maps.Keys(before))) {
		// The time of change counts too: a new socket can have the old one's number.
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

// staleAmong returns those of the paths that are sockets which refuse.
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
