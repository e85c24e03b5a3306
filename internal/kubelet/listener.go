package kubelet

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// listener is one listener of a Socket: what it announces, and what the kubelet said to it.
// Republishing makes another; the old one's connections are served on, so that
// the kubelet's Notify of what it did before does not fail.
type listener struct {
	*net.UnixListener
	s        *Socket
	id       unixsock.FileID // the file it is bound to. The listener holds the inode, so no other file can get it
	dir      unixsock.FileID // the directory it was put into
	done     chan struct{}   // closed when it accepts no more
	stopping chan struct{}   // closed to end a wait of the accept loop
	stopOnce sync.Once
	kept     bool // in the descriptor store; only the worker of s looks

	// Guarded by s.mu.
	live            bool // it is what s publishes, or about to be: what the kubelet says to it is recorded
	announced       status.Announcement
	publishedAt     time.Time
	getInfoAt       time.Time
	notification    status.Notification
	firstAcceptedAt time.Time // zero: none yet
}

func newListener(s *Socket, l *net.UnixListener) *listener {
	l.SetUnlinkOnClose(false) // the path is removed by identity, or not at all
	return &listener{s: s, UnixListener: l, done: make(chan struct{}), stopping: make(chan struct{})}
}

// lastCalls is how long a listener that has lost its name may accept what is in its queue.
const lastCalls = 100 * time.Millisecond

// stop closes the listener. Accepted connections go on. With last, those in the queue
// are accepted first, who would be reset otherwise; without, they are left to the next
// process that has the listener from the store.
func (p *listener) stop(last bool) error {
	end := time.Now()
	if last && p.someWait() {
		end = end.Add(lastCalls)
	}
	err := p.UnixListener.SetDeadline(end)
	if err == nil {
		p.stopOnce.Do(func() { close(p.stopping) })
		<-p.done
	}
	if cerr := p.UnixListener.Close(); !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}

// someWait reports whether there are connections in the queue.
func (p *listener) someWait() bool {
	raw, err := p.UnixListener.SyscallConn()
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
func (p *listener) accept() {
	defer close(p.done)
	var said time.Time
	for {
		c, err := p.UnixListener.AcceptUnix()
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
func (p *listener) admit(c *net.UnixConn) {
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
