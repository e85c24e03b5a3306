package regsocket

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"csi-registrar/internal/sys/unixsock"
)

// maxCallers is the number of connections that a registration socket keeps open. Only root can
// connect, and the kubelet makes one connection at a time.
const maxCallers = 64

// caller is an accepted connection to a registration socket. It is also gRPC's AuthInfo, from which
// a handler learns which socket was called, and by which process.
type caller struct {
	net.Conn
	listener *listener
	peer     unixsock.Cred
	begins   atomic.Bool // gRPC waits for the HTTP/2 preface
}

// AuthType implements credentials.AuthInfo.
func (*caller) AuthType() string { return "SO_PEERCRED" }

// SetDeadline notes whether the handshake goes on: during it gRPC sets a deadline, after it none.
func (c *caller) SetDeadline(t time.Time) error {
	c.begins.Store(!t.IsZero())
	return c.Conn.SetDeadline(t)
}

// Close may be called more than once: by the server and by callers.accept.
func (c *caller) Close() error {
	c.listener.s.r.callers.remove(c)
	return c.Conn.Close()
}

// callers are the open connections of all registration sockets. They implement
// credentials.TransportCredentials: the handshake identifies the peer before anything is read.
type callers struct {
	credentials.TransportCredentials // for what else gRPC asks

	mu   sync.Mutex
	open map[*Socket][]*caller // the oldest first
}

// accept adds an accepted connection, and returns it for the server. If its Socket has more than
// maxCallers then, the oldest is closed: the kubelet can be the last of many.
func (cs *callers) accept(l *listener, conn net.Conn) *caller {
	c := &caller{Conn: conn, listener: l}
	cs.mu.Lock()
	if cs.open == nil {
		cs.open = map[*Socket][]*caller{}
	}
	open := append(cs.open[l.s], c)
	cs.open[l.s] = open
	oldest, tooMany := open[0], len(open) > maxCallers
	cs.mu.Unlock()
	if tooMany {
		oldest.Close() // fails only if it is closed already
	}
	return c
}

// ServerHandshake implements credentials.TransportCredentials.
func (cs *callers) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c := raw.(*caller) // of listener.Accept
	var err error
	if c.peer, err = c.listener.s.r.o.Host.PeerCred(c.Conn); err != nil {
		c.listener.warn("cannot identify the peer of a connection to the registration socket; connection closed", "error", err)
		return nil, nil, err
	}
	if uid := int(c.peer.UID); uid != 0 && uid != os.Geteuid() {
		c.listener.warn("connection closed: only root may call on a registration socket", "uid", c.peer.UID, "pid", c.peer.PID)
		return nil, nil, fmt.Errorf("%s is not root", c.peer)
	}
	return c, c, nil
}

func (cs *callers) remove(c *caller) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	s := c.listener.s
	cs.open[s] = slices.DeleteFunc(cs.open[s], func(o *caller) bool { return o == c })
	if len(cs.open[s]) == 0 {
		delete(cs.open, s)
	}
}

// list returns all connections.
func (cs *callers) list() []*caller {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.Concat(slices.Collect(maps.Values(cs.open))...)
}

// callerOf returns the connection of a call: ServerHandshake made its AuthInfo.
func callerOf(ctx context.Context) *caller {
	p, _ := peer.FromContext(ctx)
	return p.AuthInfo.(*caller)
}
