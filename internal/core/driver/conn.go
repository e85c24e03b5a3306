package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
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

// liveTimeout is how long a driver has to answer Probe, the connection included: the default
// of --probe-timeout of kubernetes-csi/livenessprobe (v2.19).
const liveTimeout = 3 * time.Second

// ErrAbsent is the error of Live and LiveName if nobody listens at the driver's socket.
var ErrAbsent = errors.New("nobody listens at the driver's socket")

// Live returns nil if the driver at the socket answers Probe as kubernetes-csi/livenessprobe
// (v2.19) wants it: over a new connection, without an error of any code (Unimplemented
// included) and not with "not ready"; an answer that leaves ready out counts as ready. The text of
// an error contains nothing that the driver reported, so everybody may read it. Only a socket that
// owner may serve is asked (trust.SocketOwner).
func Live(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket string) error {
	answer, err := callOnce(ctx, pool, owner, socket, "Probe", csi.IdentityClient.Probe)
	if err == nil && notReady(answer) {
		err = errors.New("the driver answers Probe with \"not ready\"")
	}
	return err
}

// LiveName returns the name that the driver at the socket reports, asked as Live does. A name
// that the kubelet would not accept is an error.
func LiveName(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket string) (string, error) {
	info, err := callOnce(ctx, pool, owner, socket, "GetPluginInfo", csi.IdentityClient.GetPluginInfo)
	if err == nil && csiname.CheckName(info.GetName()) != nil {
		err = errors.New("the driver reports a name that the kubelet does not accept")
	}
	return info.GetName(), err
}

// callOnce makes one call over a new connection.
func callOnce[Q, A any](ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket, method string,
	do func(csi.IdentityClient, context.Context, *Q, ...grpc.CallOption) (*A, error)) (*A, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	l, err := worker.Do(ctx, pool.Slot(socket, nil), liveTimeout, func() lookResult { return lookOnce(owner, socket, true) }, lookResult.discard)
	switch {
	case err != nil:
		return nil, errors.New("the file system of the driver's socket does not answer")
	case l.state == status.Absent:
		return nil, ErrAbsent
	case l.state == status.Mismatch:
		return nil, errors.New("the owner of the driver's socket is not trusted")
	case !l.ok():
		return nil, errors.New("the driver does not accept connections")
	}
	defer l.discard() // gRPC may not have used it yet
	cc, err := grpcconn.New(l.raw, maxMessage)
	if err != nil {
		return nil, errors.New("cannot speak gRPC with the driver")
	}
	defer cc.Close()
	answer, err := do(csi.NewIdentityClient(cc), ctx, new(Q))
	deadline, _ := ctx.Deadline()
	switch code := grpcstatus.Code(err); {
	case err == nil:
		return answer, nil
	// gRPC passes the deadline on to the driver, whose answer can come just before it.
	case ctx.Err() != nil, code == codes.DeadlineExceeded && time.Until(deadline) < liveTimeout/10:
		return nil, fmt.Errorf("the driver does not answer %s within %s", method, liveTimeout)
	default:
		return nil, fmt.Errorf("the driver answers %s with the error %s", method, code)
	}
}
