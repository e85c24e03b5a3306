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

	"csi-registrar/internal/peercred"
)

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
	// Made under another name first, so that nobody ever sees one that does not listen
	// yet and takes it for dead. The name is shorter than control.sock: 107 bytes.
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

// takePlace moves our socket to the path: over nothing, or over a dead socket.
func takePlace(ctx context.Context, temp, path string) error {
	err := unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	dead, err := lookDead(ctx, path)
	if err != nil {
		return err
	}
	// They change places, so that the one that was at the path in that instant can be
	// looked at; if it is not the dead one, another daemon was faster: give it back.
	if err := exchange(temp, path); err != nil {
		return err
	}
	got, err := os.Lstat(temp)
	if err != nil {
		return err
	}
	if !os.SameFile(got, dead) {
		return errors.Join(fmt.Errorf("%w: it started at the same time", ErrRunning), exchange(temp, path))
	}
	return remove(temp)
}

func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// lookDead returns what is at the path if it is a socket that nobody listens on.
func lookDead(ctx context.Context, path string) (fs.FileInfo, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return nil, errors.New("something else has that name: move it away")
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fi, nil
	case errors.Is(err, syscall.EAGAIN): // listens, and has no room for another connection
		return nil, ErrRunning
	case err != nil:
		return nil, err
	}
	who, err := peercred.Of(c.(*net.UnixConn))
	err = errors.Join(err, c.Close())
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrRunning, err)
	}
	return nil, fmt.Errorf("%w (%s)", ErrRunning, who)
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
