package kubelet

import (
	"context"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

const (
	handshakeIn = 10 * time.Second
	// idleFor is longer than NodeGetInfo may take (2 min, kubelet v1.36): the kubelet keeps its
	// connection between GetInfo and Notify.
	idleFor     = 3 * time.Minute
	maxMessage  = 64 << 10 // an error text in Notify has a few kB at most
	maxRefusal  = 1000     // bytes of an error text that are kept
	maxStreams  = 4        // the kubelet makes one call at a time
	maxHeaders  = 8 << 10
	bufferBytes = 4 << 10
)

// newServer returns the gRPC server of all registration sockets. A connection has handshakeIn for
// the HTTP/2 handshake, and is closed after it was idle for idleFor.
func newServer(handshakeIn, idleFor time.Duration) *grpc.Server {
	return grpc.NewServer(
		grpc.Creds(insecure.NewCredentials()),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(handshakeIn),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idleFor}),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.StaticStreamWindowSize(maxMessage),
		grpc.StaticConnWindowSize(maxMessage),
		grpc.ReadBufferSize(bufferBytes),
		grpc.WriteBufferSize(bufferBytes),
	)
}

// callerAddr is the remote address of a connection, through which gRPC shows a handler which
// connection, and so which socket, was called.
type callerAddr struct {
	net.Addr
	*conn
}

// RemoteAddr implements net.Conn for gRPC.
func (c *conn) RemoteAddr() net.Addr { return callerAddr{c.Conn.RemoteAddr(), c} }

// caller returns the connection of a call.
func caller(ctx context.Context) (callerAddr, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.Addr.(callerAddr); ok {
			return c, nil
		}
	}
	return callerAddr{}, grpcstatus.Error(codes.Internal, "cannot tell which registration socket was called")
}

// service implements the kubelet's calls.
type service struct {
	registerapi.UnimplementedRegistrationServer
}

// GetInfo answers from memory: the kubelet waits 1 s for it.
func (service) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	p, s := c.listener, c.listener.s
	s.mu.Lock()
	a := p.Announced
	live := p == s.current.Load() && !strings.HasPrefix(c.Addr.String(), unixsock.ClientPrefix)
	if live {
		p.GetInfoAt = time.Now()
		p.unsaved.Store(true) // Check writes it, for the next process
	}
	s.mu.Unlock()
	if live {
		s.r.dir.watched(p.dir)
		s.log.Debug("the kubelet called GetInfo")
		s.watch.Hint()
	}
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: s.name, Endpoint: a.Endpoint, SupportedVersions: a.Versions,
	}, nil
}

// NotifyRegistrationStatus writes what the kubelet reports to the record before it answers, so
// that a kill -9 in between loses nothing. It does not fail, because the kubelet (v1.36) would
// deregister the driver.
func (service) NotifyRegistrationStatus(ctx context.Context, in *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	p, s := c.listener, c.listener.s
	if s.r.o.Process != nil {
		s.r.o.Process.confirmed(c.conn.Conn)
	}
	n := status.Notification{At: time.Now(), Registered: in.GetPluginRegistered()}
	if !n.Registered {
		n.Error = safetext.Clean(in.GetError(), maxRefusal)
	}
	s.mu.Lock()
	live := p == s.current.Load()
	if live { // else it is about an earlier socket
		p.Notification = n
		if n.Registered {
			s.seen.Accepted++
			if p.FirstAcceptedAt.IsZero() {
				p.FirstAcceptedAt = n.At
			}
		} else {
			s.seen.Refusals++
		}
	}
	s.mu.Unlock()
	s.log.Debug("the kubelet called NotifyRegistrationStatus", "registered", n.Registered, "error", n.Error, "current", live)
	if live {
		if err := s.save(p); err != nil {
			s.log.Warn("cannot record what the kubelet reported", "error", err)
		}
		s.watch.Hint()
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}
