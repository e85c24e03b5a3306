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

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	handshakeIn = 10 * time.Second
	// idleFor is longer than NodeGetInfo may take: between GetInfo and Notify the kubelet
	// keeps its connection (2 min, kubelet v1.36).
	idleFor     = 3 * time.Minute
	maxMessage  = 64 << 10 // the kubelet's Notify carries an error text, at most some kB
	maxRefusal  = 1000     // bytes of it that are kept
	maxStreams  = 4        // the kubelet makes one call at a time
	maxHeaders  = 8 << 10
	bufferBytes = 4 << 10
)

// newServer makes the one gRPC server of all registration sockets; a server for each would
// cost several times the memory. A connection has handshakeIn to speak HTTP/2, and is closed when
// it was idle for idleFor.
func newServer(handshakeIn, idleFor time.Duration) *grpc.Server {
	server := grpc.NewServer(
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
	registerapi.RegisterRegistrationServer(server, service{})
	return server
}

// callerAddr is how a handler learns which connection, and so which socket, was called: gRPC
// gives it the connection's remote address.
type callerAddr struct {
	net.Addr
	*conn
}

// RemoteAddr is for gRPC.
func (c *conn) RemoteAddr() net.Addr { return callerAddr{c.UnixConn.RemoteAddr(), c} }

// caller returns which connection a call came by.
func caller(ctx context.Context) (callerAddr, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.Addr.(callerAddr); ok {
			c.progress.Store(called)
			return c, nil
		}
	}
	return callerAddr{}, grpcstatus.Error(codes.Internal, "cannot tell which registration socket was called")
}

// service is what the kubelet calls.
type service struct {
	registerapi.UnimplementedRegistrationServer
}

// GetInfo is answered from memory: the kubelet waits 1 s for it.
func (service) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	p, s := c.called, c.called.s
	s.mu.Lock()
	a := p.Announced
	live := p == s.current.Load() && !strings.HasPrefix(c.Addr.String(), unixsock.ClientPrefix)
	if live {
		p.GetInfoAt = time.Now()
		p.unsaved.Store(true) // Check writes it: the next process may have to know that a kubelet asked
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

// NotifyRegistrationStatus records what the kubelet reports before it is answered, so
// that a kill -9 in between forgets nothing. It never fails: the kubelet (v1.36)
// deregisters a plugin that does not.
func (service) NotifyRegistrationStatus(ctx context.Context, in *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	p, s := c.called, c.called.s
	n := status.Notification{At: time.Now(), Registered: in.GetPluginRegistered()}
	if !n.Registered {
		n.Error = safetext.Clean(in.GetError(), maxRefusal)
	}
	s.mu.Lock()
	live := p == s.current.Load()
	if live { // else it speaks of what was published before
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
