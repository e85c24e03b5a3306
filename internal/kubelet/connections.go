package kubelet

import (
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
)

const (
	maxConns    = 64               // of a registration socket
	firstCallIn = 10 * time.Second // a connection without a complete call is closed
	// idleFor is longer than NodeGetInfo may take: between GetInfo and Notify the kubelet
	// keeps its connection (2 min, kubelet v1.36).
	idleFor = 3 * time.Minute
	// speakIn is the time that even a flood leaves a connection to say something. Newcomers
	// wait in the listener's queue: 1,000 of them for 0.1 s, a full queue (4,096) for 0.4 s.
	speakIn = 5 * time.Millisecond
)

// connections are all connections of all registration sockets.
type connections struct {
	mu    sync.Mutex
	of    map[*Socket][]*conn // oldest first
	first time.Duration       // firstCallIn, shorter in tests
	idle  time.Duration       // idleFor, shorter in tests
}

func newConnections() *connections {
	return &connections{of: make(map[*Socket][]*conn), first: firstCallIn, idle: idleFor}
}

// conn is an accepted connection that knows what it called.
type conn struct {
	*net.UnixConn
	called *listener
	all    *connections
	timer  *time.Timer
	spoke  atomic.Bool // as an HTTP/2 client does

	// Guarded by all.mu.
	calls    int  // being answered
	complete bool // at least one was
	closed   bool
}

// add takes a new connection in; nil if there is no room.
func (cs *connections) add(p *listener, uc *net.UnixConn) *conn {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.of[p.s]) >= maxConns {
		return nil
	}
	c := &conn{UnixConn: uc, called: p, all: cs}
	cs.of[p.s] = append(cs.of[p.s], c)
	c.timer = time.AfterFunc(cs.first, c.expire)
	return c
}

// makeRoom closes the connections of s, if there are too many, that are needed least: those that never said
// anything, else those without a complete call, else the oldest idle one. So a flood closes
// its own connections, and the kubelet, which speaks at once, is answered.
func (cs *connections) makeRoom(s *Socket) {
	var silent, incomplete, idle []*conn
	cs.mu.Lock()
	list := cs.of[s]
	if len(list) < maxConns {
		list = nil
	}
	for _, c := range list {
		switch {
		case c.calls > 0:
		case c.complete:
			idle = append(idle, c)
		case c.silent():
			silent = append(silent, c)
		default:
			incomplete = append(incomplete, c)
		}
	}
	cs.mu.Unlock()
	switch {
	case len(silent) > 0:
		closeAll(silent)
	case len(incomplete) > 0:
		closeAll(incomplete)
	case len(idle) > 0:
		closeAll(idle[:1])
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
		c.Close()
	}
}

func (cs *connections) begin(c *conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c.calls++
}

func (cs *connections) end(c *conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c.calls--
	c.complete = true
	if !c.closed {
		c.timer.Reset(cs.idle)
	}
}

// expire closes a connection that had its time, unless it is just being answered.
func (c *conn) expire() {
	c.all.mu.Lock()
	busy := c.calls > 0 // end sets the timer
	c.all.mu.Unlock()
	if !busy {
		c.Close()
	}
}

// silent reports whether the other side has sent nothing at all.
func (c *conn) silent() bool {
	if c.spoke.Load() {
		return false
	}
	waiting := 0
	raw, err := c.SyscallConn()
	if err == nil {
		cerr := raw.Control(func(fd uintptr) { waiting, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
		return cerr != nil || err != nil || waiting == 0
	}
	return true
}

// preface is what every HTTP/2 client says first (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// handshake takes the place of TLS: until a connection has sent the preface it costs no
// buffers, and noise is closed at its first wrong byte.
type handshake struct {
	credentials.TransportCredentials
}

func (h handshake) ServerHandshake(nc net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c := nc.(*conn) // of listener.Accept
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	var sent [len(preface)]byte
	var n int
	err = raw.Read(func(fd uintptr) (done bool) { // again when there is more, until the deadline
		var peekErr error
		n, _, peekErr = unix.Recvfrom(int(fd), sent[:], unix.MSG_PEEK)
		more := peekErr == unix.EAGAIN || n > 0 && n < len(sent) && strings.HasPrefix(preface, string(sent[:n]))
		return !more
	})
	if err != nil || n < len(sent) || string(sent[:]) != preface {
		return nil, nil, io.EOF // as if it had hung up: no more words about it
	}
	c.spoke.Store(true)
	return h.TransportCredentials.ServerHandshake(c)
}

// Close may be called more than once, by the server and by whoever closes it early.
func (c *conn) Close() error {
	cs, s := c.all, c.called.s
	cs.mu.Lock()
	closed := c.closed
	c.closed = true
	c.timer.Stop()
	if cs.of[s] = slices.DeleteFunc(cs.of[s], func(o *conn) bool { return o == c }); len(cs.of[s]) == 0 {
		delete(cs.of, s)
	}
	cs.mu.Unlock()
	if closed {
		return nil
	}
	return c.UnixConn.Close() // waits for its reader: not under the lock
}
