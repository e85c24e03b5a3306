package control

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/unixsock"
)

// maxPath is the longest path of a Unix socket, in bytes (unix(7)).
const maxPath = 107

// ErrRunning is wrapped by Listen's error when another daemon serves the path.
var ErrRunning = errors.New("another csi-registrar runs")

// Listen makes the control socket where nobody hands it over. Its folder is made if it is
// missing (0755: it holds configuration that everybody may read). The file has mode 0600
// and listens from the first moment that it can be seen. A dead socket at the path, left
// behind by a daemon that was killed, is replaced; a live one is ErrRunning; anything
// else is left alone and named. Close removes the file, if it is still this one.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	fail := func(err error) (net.Listener, error) {
		return nil, fmt.Errorf("cannot make the control socket %s: %w", path, err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail(err)
	}
	if len(path) > maxPath {
		return fail(fmt.Errorf("its path has %d bytes, at most %d are possible", len(path), maxPath))
	}
	unlock, err := lock(filepath.Join(dir, ".control.lock"))
	if err != nil {
		return fail(err)
	}
	defer unlock()
	// Made under another name first, so that nobody ever sees one that does not listen
	// yet and takes it for dead.
	temp := filepath.Join(dir, ".c"+rand.Text()[:6])
	ln, err := bind(ctx, temp)
	if err != nil {
		return fail(err)
	}
	own, err := os.Lstat(temp)
	if err == nil {
		err = takePlace(ctx, temp, path)
	}
	if err != nil {
		return fail(errors.Join(err, ln.Close(), remove(temp)))
	}
	return &ownListener{Listener: ln, path: path, own: own}, nil
}

// lock keeps two daemons that start at once from replacing each other's socket: finding a
// socket dead and removing it is not one step. The file stays; a lock on the folder
// itself could be held by everybody who may read it.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	raw, err := f.SyscallConn()
	if err == nil {
		var lockErr error
		err = raw.Control(func(fd uintptr) { lockErr = unix.Flock(int(fd), unix.LOCK_EX|unix.LOCK_NB) })
		err = errors.Join(err, lockErr)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%w: it starts at this moment", ErrRunning)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // which unlocks; nothing was written
}

func bind(ctx context.Context, path string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var chmodErr error
		// On a socket without a name this sets the mode of the file that bind makes.
		err := c.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmodErr)
	}}
	ln, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false) // it would remove whatever has the name then
	return ln, nil
}

// takePlace moves our socket to the path: over nothing, or in the place of a dead one.
func takePlace(ctx context.Context, temp, path string) error {
	move := func() error {
		return unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
	}
	err := move()
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := removeDead(ctx, path); err != nil {
		return err
	}
	return move()
}

// removeDead removes what is at the path if it is a socket that nobody listens on.
func removeDead(ctx context.Context, path string) error {
	found, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) { // its daemon ended in this moment
		return nil
	}
	if err != nil {
		return err
	}
	if found.Mode().Type() != fs.ModeSocket {
		return errors.New("something else has that name: move it away")
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		who, err := unixsock.PeerCred(c.(*net.UnixConn))
		if err := errors.Join(err, c.Close()); err != nil {
			return fmt.Errorf("%w (%w)", ErrRunning, err)
		}
		return fmt.Errorf("%w (%s)", ErrRunning, who)
	case errors.Is(err, syscall.EAGAIN): // listens, and has no room for another connection
		return ErrRunning
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case !errors.Is(err, syscall.ECONNREFUSED):
		return err
	}
	// Dead. The lock keeps other daemons away, but not systemd's own socket unit.
	if now, err := os.Lstat(path); err != nil || !os.SameFile(now, found) {
		return fmt.Errorf("%w: it started at the same time", ErrRunning)
	}
	return remove(path)
}

func remove(path string) error {
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// ownListener removes its file when it is closed.
type ownListener struct {
	net.Listener
	path string
	own  fs.FileInfo
	once sync.Once // the inode's number may soon be another socket's
	err  error
}

// Close removes the file first, so that nobody connects to a socket that is about to end.
func (l *ownListener) Close() error {
	l.once.Do(func() {
		var err error
		if now, statErr := os.Lstat(l.path); statErr == nil && os.SameFile(now, l.own) {
			err = remove(l.path)
		}
		l.err = errors.Join(err, l.Listener.Close())
	})
	return l.err
}
