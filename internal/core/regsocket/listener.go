package kubelet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/unixsock"
)

// listener is one listener of a Socket, with its announcement and the kubelet's answer.
// Republishing creates another one; the connections of the old one are still served, so that a
// pending Notify of the kubelet does not fail.
type listener struct {
	Listener
	s        *Socket
	dir      unixsock.FileID // the directory that it was moved to
	done     chan struct{}   // closed when it accepts no more
	warnedAt time.Time       // Accept's
	unsaved  atomic.Bool     // the written record is not complete

	record         // guarded by s.mu, but for Path, Bound and FileID, which never change
	notKept string // why it is not in the descriptor store; guarded by s.mu
}

func newListener(s *Socket, l Listener, dir unixsock.FileID, rec record) *listener {
	return &listener{Listener: l, s: s, dir: dir, record: rec, done: make(chan struct{})}
}

// serve answers the kubelet until the listener is stopped. Its goroutine is the only one of a
// published socket.
func (p *listener) serve() {
	go func() {
		defer close(p.done)
		_ = p.s.r.server.Serve(p) // the error of Accept: it was stopped
	}()
}

const (
	// lastCalls is how long a listener whose name was removed accepts connections from its
	// queue: the kubelet (v1.36) waits no longer for the answer to GetInfo.
	lastCalls = time.Second
	// acceptPause is the time between attempts while there are no descriptors; the kubelet waits
	// in the listener's queue, for at most 1 s.
	acceptPause = 100 * time.Millisecond
	warnPause   = time.Minute // between two warnings of one listener about its callers
)

// pending reports whether the listener has a connection to accept.
func (p *listener) pending() bool {
	raw, err := p.SyscallConn()
	if err != nil {
		return false
	}
	ready := 0
	err = raw.Control(func(fd uintptr) {
		// 0 after an error.
		ready, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	})
	return err == nil && ready > 0
}

// stop closes the listener, if it is open. Accepted connections are still served. With last, it
// accepts those in the queue first, which would otherwise be reset; without, they are left to the
// next process, which gets the listener from the store.
func (p *listener) stop(last bool) {
	for end := time.Now().Add(lastCalls); last && p.pending() && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // nothing reports that the queue is empty
	}
	_ = p.SetDeadline(time.Now()) // fails if it is closed already
	<-p.done                      // the server has closed it
}

// Accept implements net.Listener for gRPC: it returns the next connection that is allowed to call.
// It fails only when the listener is stopped.
func (p *listener) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		switch {
		case err == nil:
			if conn := p.admit(c); conn != nil {
				return conn, nil
			}
			c.Close()
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return nil, net.ErrClosed
		default:
			p.warn("cannot accept connections of the kubelet; trying again", "error", fmt.Sprint(err, unixsock.Hint(err)))
			time.Sleep(acceptPause)
		}
	}
}

// admit returns the connection for the server; nil if its peer is not allowed to call.
func (p *listener) admit(c net.Conn) *conn {
	cred, err := p.s.r.o.Host.PeerCred(c)
	if err != nil {
		p.warn("cannot identify the peer of a connection to the registration socket; connection closed", "error", err)
		return nil
	}
	if uid := int(cred.UID); uid != 0 && uid != os.Geteuid() {
		p.warn("connection closed: only root may call on a registration socket", "uid", cred.UID, "pid", cred.PID)
		return nil
	}
	return p.s.r.conns.add(p, c)
}

// warn logs what callers could cause at will, so not every time.
func (p *listener) warn(text string, args ...any) {
	if time.Since(p.warnedAt) > warnPause {
		p.warnedAt = time.Now()
		p.s.log.Warn(text, args...)
	}
}
