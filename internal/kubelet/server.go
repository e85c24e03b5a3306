package kubelet

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	maxMessage  = 64 << 10 // the kubelet's Notify carries an error text, at most some kB
	maxRefusal  = 1000     // bytes of it that are kept
	maxStreams  = 4        // the kubelet makes one call at a time
	maxHeaders  = 8 << 10
	bufferBytes = 4 << 10
)

// newServer makes the one gRPC server of all registration sockets; a server for each
// would cost several times the memory.
func newServer(cs *connections) *grpc.Server {
	server := grpc.NewServer(
		grpc.Creds(connectionCredentials{}),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			c, err := caller(ctx)
			if err != nil {
				return nil, err
			}
			cs.begin(c)
			defer cs.end(c)
			return handle(ctx, req)
		}),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(firstCallIn),
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

// channelListener is the server's one listener: all accept loops put their connections in.
type channelListener struct {
	in     chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newChannelListener() *channelListener {
	return &channelListener{in: make(chan net.Conn), closed: make(chan struct{})}
}

func (f *channelListener) put(c net.Conn) {
	select {
	case f.in <- c:
	case <-f.closed:
		c.Close()
	}
}

func (f *channelListener) Accept() (net.Conn, error) {
	select {
	case c := <-f.in:
		return c, nil
	case <-f.closed:
		return nil, net.ErrClosed
	}
}

func (f *channelListener) Close() error {
	f.once.Do(func() { close(f.closed) })
	return nil
}

func (f *channelListener) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: pluginreg.DirName} }

// connectionCredentials takes the place of TLS: it lets the handlers know which connection, and so
// which socket, was called.
type connectionCredentials struct{}

type callerInfo struct{ *conn }

func (callerInfo) AuthType() string { return "unix" }

func (connectionCredentials) ServerHandshake(nc net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := nc.(*conn)
	if !ok {
		return nil, nil, errors.New("not a connection of a registration socket")
	}
	if err := c.readPreface(); err != nil {
		return nil, nil, err
	}
	return c, callerInfo{c}, nil
}

func (connectionCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("for servers only")
}
func (connectionCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (connectionCredentials) Clone() credentials.TransportCredentials { return connectionCredentials{} }
func (connectionCredentials) OverrideServerName(string) error         { return nil }

func caller(ctx context.Context) (*conn, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(callerInfo); ok {
			return info.conn, nil
		}
	}
	return nil, grpcstatus.Error(codes.Internal, "cannot tell which registration socket was called")
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
	p, s := c.pub, c.pub.s
	s.mu.Lock()
	a := p.announced
	own := strings.HasPrefix(c.RemoteAddr().String(), unixsock.ClientPrefix)
	live := p.live && !own
	if live {
		p.getInfoAt = time.Now()
	}
	s.mu.Unlock()
	if live {
		s.r.dir.watched(p.dir)
		s.log.Debug("the kubelet called GetInfo", "known", a.Endpoint != "")
		s.watch.Hint()
	}
	if a.Endpoint == "" {
		return nil, grpcstatus.Error(codes.Unavailable, "csi-registrar was restarted without its record and has not asked the driver yet")
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
	p, s := c.pub, c.pub.s
	n := status.Notification{At: time.Now(), Registered: in.GetPluginRegistered()}
	if !n.Registered {
		n.Error = safetext.Clean(in.GetError(), maxRefusal)
	}
	s.mu.Lock()
	live := p.live
	if live { // else it speaks of what was published before
		p.notification = n
		if n.Registered {
			s.counts.accepted++
			if p.firstAcceptedAt.IsZero() {
				p.firstAcceptedAt = n.At
			}
		} else {
			s.counts.refusals++
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
