package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	// What one answer may hold. The kubelet itself allows 16 MB; a GetPluginInfo or
	// NodeGetInfo has a few hundred bytes.
	maxMessage = 256 << 10

	// What a driver may send in a minute, over all connections together. A read counts as
	// minRead bytes at least: byte by byte it would cost a wakeup each.
	maxPerMinute = 1 << 20
	minRead      = 256

	// closeLimit is for saying goodbye to a driver that does not read.
	closeLimit = 100 * time.Millisecond
)

var (
	flood    = finding{status.Starting, "the driver sends more than 1 MiB a minute"}
	errFlood = errors.New(flood.reason)
)

// conn is gRPC over one connection to a driver's socket, and over that alone: when it breaks,
// nothing dials again.
type conn struct {
	target
	*stream
	cc       *grpc.ClientConn
	file     unixsock.File // what it was connected to
	answered time.Time     // when the last answer came, or it was made
}

// broken reports whether the connection ended. The stream knows it before gRPC tells the
// calls; gRPC alone knows of a GOAWAY that it acts on.
func (c *conn) broken() bool {
	s := c.cc.GetState()
	return c.ended.Load() || s == connectivity.TransientFailure || s == connectivity.Shutdown
}

func (c *conn) close() {
	c.kept.Store(false)
	defer time.AfterFunc(closeLimit, func() { c.Conn.Close() }).Stop()
	c.cc.Close()   // fails only if it was closed before
	c.Conn.Close() // if gRPC never came to take it
}

// stream is the connection below gRPC. It limits what the driver sends, and notes its end,
// which it hints while the connection is kept.
type stream struct {
	net.Conn
	hint   func()
	budget *budget
	kept   atomic.Bool // between two Asks
	ended  atomic.Bool
}

// budget counts what one driver sends. A connection of before may still be read from while the
// next one is used.
type budget struct {
	mu    sync.Mutex
	spent int // within the minute from begun on
	begun time.Time
}

// spend counts n bytes more and reports whether the driver has now sent too much.
func (b *budget) spend(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := time.Now(); now.Sub(b.begun) > time.Minute {
		b.spent, b.begun = 0, now
	}
	b.spent += n
	return b.spent > maxPerMinute
}

// Read counts all bytes, also those that come together with an error.
func (s *stream) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	if s.budget.spend(max(n, minRead)) {
		err = errors.Join(errFlood, s.Conn.Close()) // also ends a write that the driver does not take
	}
	if err != nil {
		s.end()
	}
	return n, err
}

// Close is called by gRPC when it has had enough of the driver, or we of it.
func (s *stream) Close() error {
	s.end()
	return s.Conn.Close()
}

func (s *stream) end() {
	if !s.ended.Swap(true) && s.kept.Load() {
		s.hint()
	}
}

// dial connects to the path. bind comes before listen: a fresh socket that refuses is tried
// again for a while. Nothing tells when listen comes; a dial that is refused costs microseconds.
func (c *Client) dial(ctx context.Context, at target) (*conn, finding) {
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		l := c.lookAt(ctx, at, true)
		if l.ok() {
			t := &conn{target: at, stream: &stream{Conn: l.raw, hint: c.hints.Hint, budget: &c.budget}, file: l.file, answered: time.Now()}
			var err error
			if t.cc, err = unixsock.NewClient(t.stream, maxMessage); err != nil {
				l.discard()
				return nil, finding{status.Starting, fmt.Sprintf("cannot speak gRPC: %v", err)}
			}
			return t, finding{}
		}
		if !errors.Is(l.err, unix.ECONNREFUSED) || l.file.FileID != c.seen.file || !c.seen.youngerThan(fresh) {
			return nil, l.finding
		}
		select {
		case <-ctx.Done():
			return nil, interrupted
		case <-time.After(delay):
		}
	}
}
