package kubelet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"csi-registrar/internal/unixsock"
)

// listener is one listener of a Socket: what it announces, and what the kubelet said to it.
// Republishing makes another; the old one's connections are served on, so that
// the kubelet's Notify of what it did before does not fail.
type listener struct {
	*net.UnixListener
	s        *Socket
	dir      unixsock.FileID // the directory it was put into
	done     chan struct{}   // closed when it accepts no more
	stopping chan struct{}   // closed to end a wait of Accept
	stopOnce sync.Once
	warnedAt time.Time // Accept's

	record        // guarded by s.mu, but for Path, Bound and FileID, which never change
	notKept error // why it is not in the descriptor store; guarded by s.mu
}

func newListener(s *Socket, l *net.UnixListener, dir unixsock.FileID, rec record) *listener {
	l.SetUnlinkOnClose(false) // the path is removed by identity, or not at all
	return &listener{UnixListener: l, s: s, dir: dir, record: rec, done: make(chan struct{}), stopping: make(chan struct{})}
}

// serve answers the kubelet until the listener is stopped. Its goroutine is the only one that
// a published socket costs.
func (p *listener) serve() {
	go func() {
		defer close(p.done)
		err := p.s.r.server.Serve(p)
		if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, grpc.ErrServerStopped) {
			p.s.log.Error("the registration socket is no longer served", "error", err)
		}
	}()
}

// lastCalls is how long a listener that has lost its name may accept what is in its queue.
const lastCalls = 100 * time.Millisecond

// stop closes the listener; once is enough. Accepted connections go on. With last, those in
// the queue are accepted first, who would be reset otherwise; without, they are left to the
// next process that has the listener from the store.
func (p *listener) stop(last bool) (err error) {
	p.stopOnce.Do(func() {
		end := time.Now()
		if last && p.someWait() {
			end = end.Add(lastCalls)
		}
		close(p.stopping)
		if err = p.SetDeadline(end); err == nil {
			<-p.done
			err = p.UnixListener.Close()
		}
		if errors.Is(err, net.ErrClosed) { // the server closes it too
			err = nil
		}
	})
	return err
}

// someWait reports whether there are connections in the queue.
func (p *listener) someWait() bool {
	raw, err := p.SyscallConn()
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

const (
	// acceptPause is between tries while there are no descriptors; the kubelet waits in
	// the listener's queue, and its GetInfo takes at most 1 s.
	acceptPause = 100 * time.Millisecond
	warnPause   = time.Minute // between two warnings of one listener about its callers
)

// Accept is for gRPC: it returns the next connection that may call. It fails only when the
// listener is stopped.
func (p *listener) Accept() (net.Conn, error) {
	for {
		c, err := p.AcceptUnix()
		switch {
		case err == nil:
			if conn := p.admit(c); conn != nil {
				return conn, nil
			}
			continue
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return nil, net.ErrClosed
		}
		if p.someWait() { // without descriptors accept fails also while nobody is there
			p.warn("cannot accept the kubelet's connection; trying again", "error", fmt.Sprint(err, unixsock.Hint(err)))
		}
		if !p.pause(acceptPause) {
			return nil, net.ErrClosed
		}
	}
}

// admit returns the connection for the server if it may call at all.
func (p *listener) admit(c *net.UnixConn) *conn {
	conns := p.s.r.conns
	cred, err := unixsock.PeerCred(c)
	switch uid := int(cred.UID); {
	case err != nil:
		p.warn("cannot tell who connected to the registration socket; connection closed", "error", err)
	case uid != 0 && uid != os.Geteuid():
		p.warn("connection closed: only root may call on a registration socket", "uid", cred.UID, "pid", cred.PID)
	default:
		conn := conns.add(p, c)
		if conn == nil {
			p.pause(speakIn)
			conns.makeRoom(p.s)
			conn = conns.add(p, c)
		}
		if conn != nil {
			return conn
		}
	}
	c.Close()
	return nil
}

// pause reports whether the time passed before the listener was stopped.
func (p *listener) pause(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-p.stopping:
		return false
	}
}

// warn says what callers could repeat at will, so not each time.
func (p *listener) warn(text string, args ...any) {
	if time.Since(p.warnedAt) > warnPause {
		p.warnedAt = time.Now()
		p.s.log.Warn(text, args...)
	}
}
