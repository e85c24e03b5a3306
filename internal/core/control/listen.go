package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
)

// ErrRunning is wrapped by Listen's error when another daemon serves the path.
var ErrRunning = errors.New("another csi-registrar is running")

// Listen creates the control socket if the service manager does not pass it. It creates a missing
// directory (0755: everybody may read it). The file has mode 0600. Listen replaces a stale socket
// at the path, left by a daemon that was killed; for a live one it returns ErrRunning, and for any
// other file an error that names it. Close removes the file if it is still the same.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	fail := func(err error) (net.Listener, error) {
		return nil, fmt.Errorf("cannot create the control socket %s: %w", path, err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail(err)
	}
	if err := unixsock.CheckPath(path); err != nil {
		return fail(err)
	}
	unlock, err := lock(filepath.Join(dir, ".control.lock"))
	if err != nil {
		return fail(err)
	}
	defer unlock()
	ln, file, err := unixsock.Listen(ctx, path, nil)
	if errors.Is(err, unix.EADDRINUSE) {
		if err = vacate(ctx, path); err == nil {
			ln, file, err = unixsock.Listen(ctx, path, nil)
		}
	}
	if err != nil {
		return fail(err)
	}
	own := &ownListener{Listener: ln}
	own.close = sync.OnceValue(func() error { // another socket may get the inode number later
		_, err := unixsock.Remove(path, file.FileID)
		return errors.Join(err, own.Listener.Close())
	})
	return own, nil
}

// lock prevents two daemons that start at the same time from replacing each other's socket: finding
// a socket stale and removing it are two steps. The file stays. (Every user who can read the
// directory could hold a lock on the directory itself.)
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%w: it is starting", ErrRunning)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // which unlocks; nothing was written
}

// vacate removes a stale socket from the path.
func vacate(ctx context.Context, path string) error {
	_, err := unixsock.Vacate(ctx, path)
	if held, ok := errors.AsType[*unixsock.InUse](err); ok && held.Live {
		return fmt.Errorf("%w: %s", ErrRunning, held.Holder)
	} else if ok {
		return fmt.Errorf("%s has that name: move it away", held.Holder)
	}
	return err
}

// ownListener removes its file when it is closed.
type ownListener struct {
	net.Listener
	close func() error
}

// Close removes the file first, so that no client connects to a socket that is about to close.
func (l *ownListener) Close() error { return l.close() }

// rootListener accepts connections of root and of the daemon's own user, and closes others.
type rootListener struct {
	net.Listener
	log *slog.Logger
}

func (l rootListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		cred, err := unixsock.PeerCred(c.(syscall.Conn))
		if err == nil && (cred.UID == 0 || int64(cred.UID) == int64(os.Geteuid())) {
			return c, nil
		}
		if err == nil {
			err = errors.New("only root may use it")
		}
		l.log.Warn("refused a connection to the control socket", "peer", cred.String(), "error", errors.Join(err, c.Close()))
	}
}
