package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// publication is one listener of a Socket: what it tells, and what the kubelet said to
// it. Publishing anew makes another; the old one's connections are served on, so that
// the kubelet's Notify of what it did before does not fail.
type publication struct {
	s        *Socket
	listener *net.UnixListener
	id       fileID        // the file it is bound to. The listener holds the inode, so no other file can get it
	folder   fileID        // the folder it was put into
	done     chan struct{} // closed when it accepts no more
	stopping chan struct{} // closed to end a wait of the accept loop
	stopOnce sync.Once
	proof    atomic.Pointer[proof]
	inStore  bool // guarded by s.op

	// Guarded by s.mu.
	live        bool // it is the Socket's, or about to be: its word is recorded
	announced   status.Announcement
	publishedAt time.Time
	getInfoAt   time.Time
	word        status.Notification
	firstYesAt  time.Time // zero: none yet
}

func newPublication(s *Socket, l *net.UnixListener) *publication {
	l.SetUnlinkOnClose(false) // the path is removed by identity, or not at all
	return &publication{s: s, listener: l, done: make(chan struct{}), stopping: make(chan struct{})}
}

// lastCalls is how long a listener that has lost its name may accept what is in its queue.
const lastCalls = 100 * time.Millisecond

// stop closes the listener. Accepted connections go on. With last, those in the queue
// are accepted first, who would be reset otherwise; without, they are left to the next
// process that has the listener from the store.
func (p *publication) stop(last bool) error {
	end := time.Now()
	if last && p.someWait() {
		end = end.Add(lastCalls)
	}
	err := p.listener.SetDeadline(end)
	if err == nil {
		p.stopOnce.Do(func() { close(p.stopping) })
		<-p.done
	}
	if cerr := p.listener.Close(); !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}

// someWait tells whether there are connections in the queue.
func (p *publication) someWait() bool {
	raw, err := p.listener.SyscallConn()
	if err != nil {
		return false
	}
	ready := 0
	if err := raw.Control(func(fd uintptr) {
		ready, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	}); err != nil {
		return false
	}
	return ready > 0
}

// accept takes connections until the listener is stopped. It is the only goroutine that
// a published socket costs.
func (p *publication) accept() {
	defer close(p.done)
	var said time.Time
	for {
		c, err := p.listener.AcceptUnix()
		// Without descriptors accept fails also while nobody is there.
		waiting := err != nil && p.someWait()
		switch {
		case err == nil:
			p.admit(c)
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return
		case waiting && p.s.r.conns.evict(p.s):
			// One of this socket's own idlers gave its descriptor away.
		default:
			if waiting && time.Since(said) > acceptSayAgain {
				said = time.Now()
				p.s.log.Error("cannot accept the kubelet's connection; trying again", "error", err, "hint", acceptHint(err))
			}
			select {
			case <-time.After(acceptPause):
			case <-p.stopping:
				return
			}
		}
	}
}

const (
	// acceptPause is between tries while there are no descriptors; the kubelet waits in
	// the listener's queue, and its GetInfo takes at most 1 s.
	acceptPause    = 100 * time.Millisecond
	acceptSayAgain = time.Minute
)

func acceptHint(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "the daemon has no file descriptors left: raise LimitNOFILE= of the unit"
	case errors.Is(err, unix.ENFILE):
		return "the node has no file descriptors left: raise the sysctl fs.file-max"
	}
	return "the node is short of memory or of something else"
}

// admit hands a new connection to the server if it may call at all.
func (p *publication) admit(c *net.UnixConn) {
	if p.proof.Load().is(c.RemoteAddr()) {
		c.Close()
		return
	}
	cred, err := unixsock.PeerCred(c)
	if err != nil {
		p.s.log.Warn("cannot tell who connected to the registration socket; connection closed", "error", err)
		c.Close()
		return
	}
	if uid := int(cred.UID); uid != 0 && uid != os.Geteuid() {
		if p.s.r.conns.firstOf(cred.UID) {
			p.s.log.Warn("connection closed: only root may call on a registration socket", "uid", cred.UID, "pid", cred.PID)
		}
		c.Close()
		return
	}
	conn, wait := p.s.r.conns.add(p, c, speakIn)
	if wait > 0 {
		select {
		case <-time.After(wait):
		case <-p.stopping:
		}
		conn, _ = p.s.r.conns.add(p, c, 0)
	}
	if conn == nil {
		c.Close()
		return
	}
	p.s.r.calls.put(conn)
}

// bind makes a listening socket under a temporary name in folder. Its file is 0600 from
// its first moment: the mode of the unbound socket is the mode of the file that bind
// makes, and the process's umask, which all goroutines share, need not be touched.
func bind(ctx context.Context, s *Socket, folder string) (p *publication, temporary string, err error) {
	temporary = temporaryName(folder)
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var chmodErr error
		if err := raw.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return chmodErr
	}}
	l, err := lc.Listen(ctx, "unix", temporary)
	if err != nil {
		// Without the temporary name: the same trouble must read the same each time.
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			err = errno
		}
		return nil, "", fmt.Errorf("cannot make a socket in %s: %w", folder, err)
	}
	p = newPublication(s, l.(*net.UnixListener))
	f, err := lookAt(temporary)
	if err == nil && f.mode&0o777 != 0o600 {
		err = os.Chmod(temporary, 0o600) // a umask that takes from the owner as well
	}
	if err != nil {
		return nil, "", errors.Join(err, p.listener.Close(), ignoreMissing(os.Remove(temporary)))
	}
	p.id = f.fileID
	return p, temporary, nil
}
