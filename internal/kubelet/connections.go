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

// progress is what a connection was used for so far: the less, the earlier it is closed when
// there are too many.
type progress = int32

const (
	silent   progress = iota // it has sent nothing
	spoke                    // it has, but no call was answered
	answered                 // at least one call was
)

// conn is an accepted connection that knows what it called.
type conn struct {
	*net.UnixConn
	called   *listener
	progress atomic.Int32 // a progress
	calls    atomic.Int32 // being answered
}

// connections are all connections of all registration sockets.
type connections struct {
	mu sync.Mutex
	of map[*Socket][]*conn // oldest first
}

// add takes a new connection in; nil if there is no room.
func (cs *connections) add(p *listener, uc *net.UnixConn) *conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.of[p.s]) >= maxConns {
		return nil
	}
	c := &conn{UnixConn: uc, called: p}
	cs.of[p.s] = append(cs.of[p.s], c)
	return c
}

// makeRoom closes the connections of s, if there are too many, that are needed least: those that
// never said anything, else those without a complete call, else the oldest idle one. So a flood
// closes its own connections, and the kubelet, which speaks at once, is answered.
func (cs *connections) makeRoom(s *Socket) {
	var idle [answered + 1][]*conn // by progress
	cs.mu.Lock()
	all := len(cs.of[s])
	for _, c := range cs.of[s] {
		if p := c.used(); c.calls.Load() == 0 {
			idle[p] = append(idle[p], c)
		}
	}
	cs.mu.Unlock()
	switch {
	case all < maxConns:
	case len(idle[silent]) > 0:
		closeAll(idle[silent])
	case len(idle[spoke]) > 0:
		closeAll(idle[spoke])
	case len(idle[answered]) > 0:
		closeAll(idle[answered][:1])
	}
}

// list returns all connections.
func (cs *connections) list() (all []*conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, list := range cs.of {
		all = append(all, list...)
	}
	return all
}

func closeAll(list []*conn) {
	for _, c := range list {
		c.Close() // an error says that it is closed already
	}
}

// used returns the connection's progress. What was sent counts at once, for a flood can keep
// its reader from running.
func (c *conn) used() progress {
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
	cs, s := c.called.s.r.conns, c.called.s
	cs.mu.Lock()
	if cs.of[s] = slices.DeleteFunc(cs.of[s], func(o *conn) bool { return o == c }); len(cs.of[s]) == 0 {
		delete(cs.of, s)
	}
	cs.mu.Unlock()
	return c.UnixConn.Close() // waits for its reader: not under the lock
}
