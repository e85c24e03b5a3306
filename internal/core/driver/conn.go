package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/unixsock"
)

const (
	// maxMessage limits one answer. The kubelet allows 16 MB; usual answers have a few hundred
	// bytes.
	maxMessage = 256 << 10

	// maxPerMinute limits what a driver may send, over all connections together. A read counts as
	// at least minRead bytes, because a driver that sends single bytes causes a wakeup for each.
	maxPerMinute = 1 << 20
	minRead      = 256

	// closeLimit is how long closing may take with a driver that does not read.
	closeLimit = 100 * time.Millisecond
)

var (
	flood    = finding{status.Starting, "the driver sends more than 1 MiB a minute"}
	errFlood = errors.New(flood.reason)
)

// conn is a gRPC client over one connection to a driver's socket. It never dials again.
type conn struct {
	target
	*stream
	cc     *grpc.ClientConn
	file   unixsock.File // the socket that it was connected to
	server status.Server
	// when the first call since the last answer began that was not answered; zero: none
	silentSince time.Time
}

// broken reports whether the connection has ended. The stream notices that before gRPC's calls
// fail; only gRPC knows that it closes the connection because of a GOAWAY.
func (c *conn) broken() bool {
	s := c.cc.GetState()
	return c.ended.Load() || s == connectivity.TransientFailure || s == connectivity.Shutdown
}

// silent reports whether the driver has not answered over this connection for so long that a new
// one is worth trying.
func (c *conn) silent() bool {
	return !c.silentSince.IsZero() && time.Since(c.silentSince) >= maxSilence
}

func (c *conn) close() {
	c.kept.Store(false)
	defer time.AfterFunc(closeLimit, func() { c.Conn.Close() }).Stop()
	c.cc.Close()   // fails only if it is closed already
	c.Conn.Close() // gRPC may not have used it yet
}

// stream is the connection below gRPC. It limits what the driver sends, and records its end, for
// which it gives a hint while the connection is kept.
type stream struct {
	net.Conn
	hint   func()
	budget *budget
	kept   atomic.Bool // no Ask is running
	ended  atomic.Bool
}

// budget counts what one driver sends. A previous connection may still be read from while the next
// one is in use.
type budget struct {
	mu    sync.Mutex
	spent int // in the minute that began at begun
	begun time.Time
}

// spend counts n more bytes and reports whether the driver has sent too much.
func (b *budget) spend(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := time.Now(); now.Sub(b.begun) > time.Minute {
		b.spent, b.begun = 0, now
	}
	b.spent += n
	return b.spent > maxPerMinute
}

// Read also counts bytes that come with an error.
func (s *stream) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	if s.budget.spend(max(n, minRead)) {
		err = errors.Join(errFlood, s.Conn.Close()) // also ends a blocked write
	}
	if err != nil {
		s.end()
	}
	return n, err
}

// Close is also called by gRPC when it closes the connection by itself.
func (s *stream) Close() error {
	s.end()
	return s.Conn.Close()
}

func (s *stream) end() {
	if !s.ended.Swap(true) && s.kept.Load() {
		s.hint()
	}
}

// dial connects to the path.
func (c *Client) dial(ctx context.Context, at target) (*conn, finding) {
	l := c.lookAt(ctx, at, true)
	if !l.ok() {
		return nil, l.finding
	}
	t := &conn{target: at, stream: &stream{Conn: l.raw, hint: c.hints.Hint, budget: &c.budget}, file: l.file, server: l.server}
	var err error
	if t.cc, err = grpcconn.New(t.stream, maxMessage); err != nil {
		l.discard()
		return nil, finding{status.Starting, fmt.Sprintf("cannot speak gRPC: %v", err)}
	}
	return t, finding{}
}
