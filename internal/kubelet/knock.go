package kubelet

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/unixsock"
)

// dial connects from an abstract address of our own, so that another csi-registrar at
// the other end does not take it for the kubelet. The error is the system's (errors.Is).
func dial(ctx context.Context, from, path string) (*net.UnixConn, error) {
	d := net.Dialer{LocalAddr: &net.UnixAddr{Net: "unix", Name: from}}
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// ownAddress is an abstract address that nobody can guess.
func ownAddress() string { return ClientPrefix + rand.Text() }

type answer int

const (
	nobody answer = iota // there is no file
	dead                 // a file, and nobody listens
	alive                // somebody listens
)

// knock finds out whether somebody listens at path, and who. The error is set where it
// cannot be told.
func knock(ctx context.Context, path string) (answer, unixsock.Cred, error) {
	c, err := dial(ctx, ownAddress(), path)
	switch {
	case err == nil:
		defer c.Close()
		cred, err := unixsock.PeerCred(c)
		return alive, cred, err
	case errors.Is(err, os.ErrNotExist):
		return nobody, unixsock.Cred{}, nil
	case errors.Is(err, unix.ECONNREFUSED):
		return dead, unixsock.Cred{}, nil
	case errors.Is(err, unix.EAGAIN): // its queue is full
		return alive, unixsock.Cred{}, nil
	default:
		return alive, unixsock.Cred{}, err
	}
}

// deadFor is between the two looks at a socket that refuses: a program that has bound it
// is given the time to listen.
const deadFor = 100 * time.Millisecond

// removeDead removes those of the paths that are sockets and dead: connection refused
// twice, 100 ms apart, and the same file all the time. However many there are it takes
// 100 ms, and no time if none refuses. It returns what it removed.
func removeDead(ctx context.Context, paths []string) (removed []string, err error) {
	seen := make(map[string]file)
	for _, path := range paths {
		if f, isDead := deadAt(ctx, path); isDead {
			seen[path] = f
		}
	}
	if len(seen) == 0 {
		return nil, nil
	}
	select {
	case <-time.After(deadFor):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var errs []error
	for _, path := range paths {
		before, ok := seen[path]
		if !ok {
			continue
		}
		// The time of change counts too: a new socket can have the old one's number.
		if now, isDead := deadAt(ctx, path); !isDead || now != before {
			continue
		}
		did, err := remove(path, before.fileID)
		if did {
			removed = append(removed, path)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return removed, errors.Join(errs...)
}

// deadAt looks whether there is a socket at path that refuses.
func deadAt(ctx context.Context, path string) (file, bool) {
	f, err := lookAt(path)
	if err != nil || !f.isSocket() {
		return file{}, false
	}
	a, _, err := knock(ctx, path)
	return f, err == nil && a == dead
}
