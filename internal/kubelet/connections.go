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
)

const (
	maxConns    = 64               // of a registration socket
	firstCallIn = 10 * time.Second // a connection without a complete call is closed
	// idleFor is longer than NodeGetInfo may take: between GetInfo and Notify the kubelet
	// keeps its connection (2 min, kubelet v1.36).
	idleFor = 3 * time.Minute
	// speakIn is the time that even a flood leaves a connection to say something.
	// Newcomers wait in the listener's queue: 1,000 of them for 0.15 s, a full queue (4,096) for 0.7 s.
	speakIn = 10 * time.Millisecond
	maxUIDs = 16 // users who may not call that are named in the log
)

// connections are all connections of all registration sockets.
type connections struct {
	mu    sync.Mutex
	of    map[*Socket][]*conn // oldest first
	uids  []uint32            // users who may not call that were named already
	first time.Duration       // firstCallIn, shorter in tests
	idle  time.Duration       // idleFor, shorter in tests
}

func newConnections() *connections {
	return &connections{of: make(map[*Socket][]*conn), first: firstCallIn, idle: idleFor}
}

// conn is an accepted connection that knows what it called.
type conn struct {
	*net.UnixConn
	pub    *listener
	all    *connections
	since  time.Time
	timer  *time.Timer
	spoke  atomic.Bool // something was read from it
	unread string      // of the HTTP/2 preface, which is read again; one reader

	// Guarded by all.mu.
	calls    int  // being answered
	complete bool // at least one was
	closed   bool
}

// add takes a new connection in. Beyond maxConns another one has to go, that has been
// there for the given time: nil, and how long to wait for that. If none will do, because
// all of them are being answered, the new one is not taken in: nil and 0.
func (cs *connections) add(p *listener, uc *net.UnixConn, least time.Duration) (*conn, time.Duration) {
	var victim *conn
	defer func() {
		if victim != nil {
			victim.UnixConn.Close() // waits for its reader: not under the lock
		}
	}()
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if list := cs.of[p.s]; len(list) >= maxConns {
		oldest := choose(list)
		if oldest == nil {
			return nil, 0
		}
		if wait := least - time.Since(oldest.since); wait > 0 {
			return nil, wait
		}
		victim = oldest
		victim.leave()
	}
	c := &conn{UnixConn: uc, pub: p, all: cs, since: time.Now()}
	cs.of[p.s] = append(cs.of[p.s], c)
	c.timer = time.AfterFunc(cs.first, c.expire)
	return c, 0
}

// evict closes one connection of s that had its time and never completed a call, and
// reports whether there was one.
func (cs *connections) evict(s *Socket) bool {
	cs.mu.Lock()
	victim := choose(cs.of[s])
	found := victim != nil && !victim.complete && time.Since(victim.since) >= speakIn && victim.leave()
	cs.mu.Unlock()
	if found {
		victim.UnixConn.Close()
	}
	return found
}

// choose finds the connection that is needed least: the oldest that never said anything,
// else the oldest without a complete call, else the oldest idle one; none if all are
// being answered. So a flood closes its own connections, and the kubelet, which speaks
// at once, is answered.
func choose(list []*conn) *conn {
	var first, idle *conn
	for _, c := range list {
		switch {
		case c.calls > 0:
		case !c.complete && c.silent():
			return c
		case !c.complete && first == nil:
			first = c
		case c.complete && idle == nil:
			idle = c
		}
	}
	if first != nil {
		return first
	}
	return idle
}

// silent reports whether the other side has sent nothing at all: nothing was read, and
// nothing waits to be.
func (c *conn) silent() bool {
	if c.spoke.Load() {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	waiting := 0
	if err := raw.Control(func(fd uintptr) { waiting, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) }); err != nil {
		return true
	}
	return waiting == 0
}

// firstOf reports whether a user who may not call is to be named.
func (cs *connections) firstOf(uid uint32) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if slices.Contains(cs.uids, uid) || len(cs.uids) >= maxUIDs {
		return false
	}
	cs.uids = append(cs.uids, uid)
	return true
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

// closeSilent closes what cannot be waiting for an answer.
func (cs *connections) closeSilent() {
	cs.closeWhere((*conn).silent)
}

func (cs *connections) closeAll() {
	cs.closeWhere(func(*conn) bool { return true })
}

func (cs *connections) closeWhere(which func(*conn) bool) {
	cs.mu.Lock()
	var found []*conn
	for _, list := range cs.of {
		for _, c := range list {
			if which(c) {
				found = append(found, c)
			}
		}
	}
	cs.mu.Unlock()
	for _, c := range found {
		c.Close()
	}
}

// expire closes a connection that had its time, unless it is just being answered.
func (c *conn) expire() {
	c.all.mu.Lock()
	busy := c.calls > 0 && !c.closed
	if busy {
		c.timer.Reset(c.all.first)
	}
	c.all.mu.Unlock()
	if !busy {
		c.Close()
	}
}

// Close may be called more than once, by the server and by whoever closes it early.
func (c *conn) Close() error {
	c.all.mu.Lock()
	left := c.leave()
	c.all.mu.Unlock()
	if !left {
		return nil
	}
	return c.UnixConn.Close()
}

// leave takes it off the list, and reports whether it was on it: then it is to be closed.
// Under all.mu.
func (c *conn) leave() bool {
	if c.closed {
		return false
	}
	c.closed = true
	c.timer.Stop()
	cs, s := c.all, c.pub.s
	if list := slices.DeleteFunc(cs.of[s], func(o *conn) bool { return o == c }); len(list) > 0 {
		cs.of[s] = list
	} else {
		delete(cs.of, s)
	}
	return true
}

// Read gives the preface again that readPreface took.
func (c *conn) Read(b []byte) (int, error) {
	if c.unread != "" {
		n := copy(b, c.unread)
		c.unread = c.unread[n:]
		return n, nil
	}
	n, err := c.UnixConn.Read(b)
	if n > 0 {
		c.spoke.Store(true)
	}
	return n, err
}

// preface is what every HTTP/2 client says first (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// readPreface waits for the preface. Until they are there
// a connection costs no buffers, and noise is closed at its first wrong byte.
func (c *conn) readPreface() error {
	var b [len(preface)]byte
	for n := 0; n < len(b); {
		m, err := c.Read(b[n:])
		n += m
		if !strings.HasPrefix(preface, string(b[:n])) {
			return io.EOF // as if it had hung up: no more words about it
		}
		if err != nil && n < len(b) {
			return io.EOF
		}
	}
	c.unread = preface
	return nil
}
