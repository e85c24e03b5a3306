package kubelet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

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
	warnedAt time.Time       // Accept's
	unsaved  atomic.Bool     // the written record lacks something

	record         // guarded by s.mu, but for Path, Bound and FileID, which never change
	notKept string // why it is not in the descriptor store; guarded by s.mu
}

func newListener(s *Socket, l *net.UnixListener, dir unixsock.FileID, rec record) *listener {
	return &listener{UnixListener: l, s: s, dir: dir, record: rec, done: make(chan struct{})}
}

// serve answers the kubelet until the listener is stopped. Its goroutine is the only one that
// a published socket costs.
func (p *listener) serve() {
	go func() {
		defer close(p.done)
		_ = p.s.r.server.Serve(p) // the error is that of Accept: it is stopped
	}()
}

const (
	// lastCalls is how long a listener that has lost its name may accept what is in its queue:
	// the kubelet waits no longer for its GetInfo (v1.36).
	lastCalls = time.Second
	// acceptPause is between tries while there are no descriptors; the kubelet waits in
	// the listener's queue, and its GetInfo takes at most 1 s.
	acceptPause = 100 * time.Millisecond
	warnPause   = time.Minute // between two warnings of one listener about its callers
)

// stop closes the listener, if it is open. Accepted connections go on. With last, those in
// the queue are accepted first, who would be reset otherwise; without, they are left to the
// next process that has the listener from the store.
func (p *listener) stop(last bool) {
	for end := time.Now().Add(lastCalls); last && readable(p) && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // the kernel does not say when the queue is empty
	}
	_ = p.SetDeadline(time.Now()) // fails if it is closed already
	<-p.done                      // the server has closed it
}

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
			c.Close()
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return nil, net.ErrClosed
		default:
			p.warn("cannot accept connections of the kubelet; trying again", "error", fmt.Sprint(err, unixsock.Hint(err)))
			time.Sleep(acceptPause)
		}
	}
}

// admit returns the connection for the server; nil if it may not call.
func (p *listener) admit(c *net.UnixConn) *conn {
	cred, err := unixsock.PeerCred(c)
	if err != nil {
		p.warn("cannot tell who connected to the registration socket; connection closed", "error", err)
		return nil
	}
	if uid := int(cred.UID); uid != 0 && uid != os.Geteuid() {
		p.warn("connection closed: only root may call on a registration socket", "uid", cred.UID, "pid", cred.PID)
		return nil
	}
	p.s.r.conns.makeRoom(p.s)
	return p.s.r.conns.add(p, c)
}

// warn says what callers could repeat at will, so not each time.
func (p *listener) warn(text string, args ...any) {
	if time.Since(p.warnedAt) > warnPause {
		p.warnedAt = time.Now()
		p.s.log.Warn(text, args...)
	}
}
