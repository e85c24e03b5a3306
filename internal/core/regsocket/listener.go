package regsocket

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/unixsock"
)

// listener is one listener of a Socket, with its announcement and the kubelet's answer.
// Republishing creates another one; the connections of the old one are still served, so that a
// pending Notify of the kubelet does not fail.
type listener struct {
	Listener
	s        *Socket
	dir      unixsock.FileID // the directory that it was made in
	done     chan struct{}   // closed when it accepts no more
	warnings rate.Bucket     // guarded by s.mu
	unsaved  atomic.Bool     // the written record is not complete
	adopted  bool            // an earlier process published it

	record         // guarded by s.mu, but for Path, Cookie and FileID, set before it is current
	notKept string // why it is not in the descriptor store; guarded by s.mu
}

func newListener(s *Socket, l Listener, dir unixsock.FileID, rec record) *listener {
	return &listener{Listener: l, s: s, dir: dir, record: rec, done: make(chan struct{}), warnings: rate.Bucket{Burst: 1, Interval: warnPause}}
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
	// acceptPause is the time between attempts while there are no descriptors; the kubelet waits
	// in the listener's queue, for at most 1 s.
	acceptPause = 100 * time.Millisecond
	warnPause   = time.Minute // between two warnings of one listener about its callers
)

// stop closes the listener, if it is open. Accepted connections are still served. Those in its
// queue are reset if it is the last descriptor, after which the kubelet connects again; otherwise
// the next process accepts them.
func (p *listener) stop() {
	_ = p.SetDeadline(time.Now()) // fails if it is closed already
	<-p.done                      // the server has closed it
}

// Accept implements net.Listener for gRPC. It fails only when the listener is stopped.
func (p *listener) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		switch {
		case err == nil:
			return p.s.r.callers.accept(p, c), nil
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return nil, net.ErrClosed
		default:
			p.warn("cannot accept connections of the kubelet; trying again", "error", fmt.Sprint(err, unixsock.Hint(err)))
			time.Sleep(acceptPause)
		}
	}
}

// warn logs what callers could cause at will, so not every time.
func (p *listener) warn(text string, args ...any) {
	p.s.mu.Lock()
	due := p.warnings.Allow(time.Now())
	p.s.mu.Unlock()
	if due {
		p.s.log.Warn(text, args...)
	}
}
