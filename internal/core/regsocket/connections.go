package kubelet

import (
	"net"
	"slices"
	"sync"
	"sync/atomic"
)

// maxConns is the number of connections that a registration socket keeps open. Only root can
// connect, and the kubelet makes one connection at a time.
const maxConns = 64

// conn is an accepted connection to a registration socket.
type conn struct {
	net.Conn
	listener *listener
	spoke    atomic.Bool // the peer has sent something
}

// connections are the open connections of all registration sockets.
type connections struct {
	mu  sync.Mutex
	all []*conn // oldest first
}

// add adds a connection, and closes the oldest one of its Socket if there are more than maxConns.
func (cs *connections) add(l *listener, nc net.Conn) *conn {
	c := &conn{Conn: nc, listener: l}
	cs.mu.Lock()
	cs.all = append(cs.all, c)
	cs.mu.Unlock()
	if open := cs.list(l.s); len(open) > maxConns {
		open[0].Close() // fails only if it is closed already
	}
	return c
}

// list returns the connections of s, oldest first; with nil, all.
func (cs *connections) list(s *Socket) (found []*conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, c := range cs.all {
		if s == nil || s == c.listener.s {
			found = append(found, c)
		}
	}
	return found
}

// Read notes that the peer has sent something.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.spoke.Store(true)
	}
	return n, err
}

// Close may be called more than once: by the server and by add.
func (c *conn) Close() error {
	cs := &c.listener.s.r.conns
	cs.mu.Lock()
	cs.all = slices.DeleteFunc(cs.all, func(o *conn) bool { return o == c })
	cs.mu.Unlock()
	return c.Conn.Close() // waits for a Read to return: not under the lock
}
