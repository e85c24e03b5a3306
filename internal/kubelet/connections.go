package kubelet

import (
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxConns = 64 // of a registration socket
	// speakIn is the time that even a flood leaves a connection to say something. Newcomers
	// wait in the listener's queue: 1,000 of them for 0.1 s, a full queue (4,096) for 0.4 s.
	speakIn = 5 * time.Millisecond
)

// The progress of a connection: the less, the earlier it is closed when there are too many.
const (
	silent int32 = iota // it has sent nothing
	spoke               // it has, but made no call
	called              // it made a call
)

// conn is an accepted connection that knows what it called.
type conn struct {
	*net.UnixConn
	called   *listener
	progress atomic.Int32
}

// connections are the open connections of all registration sockets.
type connections struct {
	mu  sync.Mutex
	all []*conn // oldest first
}

func (cs *connections) add(p *listener, uc *net.UnixConn) *conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c := &conn{UnixConn: uc, called: p}
	cs.all = append(cs.all, c)
	return c
}

// list returns the connections of s, oldest first; with nil, all.
func (cs *connections) list(s *Socket) (found []*conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, c := range cs.all {
		if s == nil || s == c.called.s {
			found = append(found, c)
		}
	}
	return found
}

// makeRoom closes the connections of s, if there are too many, that are needed least: those that
// never said anything, else those that made no call, else the oldest one. So a flood closes its
// own connections, and the kubelet, which speaks at once, is answered.
func (cs *connections) makeRoom(s *Socket) {
	if len(cs.list(s)) < maxConns {
		return
	}
	time.Sleep(speakIn)
	list := cs.list(s)
	var by [called + 1][]*conn
	for _, c := range list {
		p := c.used()
		by[p] = append(by[p], c)
	}
	switch {
	case len(list) < maxConns:
	case len(by[silent]) > 0:
		closeAll(by[silent])
	case len(by[spoke]) > 0:
		closeAll(by[spoke])
	default:
		closeAll(by[called][:1])
	}
}

func closeAll(list []*conn) {
	for _, c := range list {
		c.Close() // an error says that it is closed already
	}
}

// used returns the connection's progress. What was sent counts at once, for a flood can keep
// its reader from running.
func (c *conn) used() int32 {
	if p := c.progress.Load(); p != silent || !readable(c) {
		return p
	}
	return spoke
}

// readable reports whether there is something to read, or for a listener to accept.
func readable(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	ready := 0
	err = raw.Control(func(fd uintptr) {
		ready, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) // 0 after an error
	})
	return err == nil && ready > 0
}

// Read notes that the other side speaks.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.UnixConn.Read(b)
	if n > 0 {
		c.progress.CompareAndSwap(silent, spoke)
	}
	return n, err
}

// Close may be called more than once, by the server and by whoever closes it early.
func (c *conn) Close() error {
	cs := &c.called.s.r.conns
	cs.mu.Lock()
	cs.all = slices.DeleteFunc(cs.all, func(o *conn) bool { return o == c })
	cs.mu.Unlock()
	return c.UnixConn.Close() // waits for its reader: not under the lock
}
