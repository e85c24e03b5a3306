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

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
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
		grpc.Creds(greeter{}),
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

// funnel is the server's one listener: all accept loops put their connections in.
type funnel struct {
	in     chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newFunnel() *funnel { return &funnel{in: make(chan net.Conn), closed: make(chan struct{})} }

func (f *funnel) put(c net.Conn) {
	select {
	case f.in <- c:
	case <-f.closed:
		c.Close()
	}
}

func (f *funnel) Accept() (net.Conn, error) {
	select {
	case c := <-f.in:
		return c, nil
	case <-f.closed:
		return nil, net.ErrClosed
	}
}

func (f *funnel) Close() error {
	f.once.Do(func() { close(f.closed) })
	return nil
}

func (f *funnel) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: folderName} }

// greeter stands where TLS would: it lets the handlers know which connection, and so
// which socket, was called.
type greeter struct{}

type callerInfo struct{ *conn }

func (callerInfo) AuthType() string { return "unix" }

func (greeter) ServerHandshake(nc net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := nc.(*conn)
	if !ok {
		return nil, nil, errors.New("not a connection of a registration socket")
	}
	if err := c.readPreface(); err != nil {
		return nil, nil, err
	}
	return c, callerInfo{c}, nil
}

func (greeter) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("for servers only")
}
func (greeter) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (greeter) Clone() credentials.TransportCredentials { return greeter{} }
func (greeter) OverrideServerName(string) error         { return nil }

func caller(ctx context.Context) (*conn, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(callerInfo); ok {
			return info.conn, nil
		}
	}
	return nil, grpcstatus.Error(codes.Internal, "cannot tell which registration socket was called")
}

// ClientPrefix begins the abstract addresses that csi-registrar's own clients bind to:
// a GetInfo from there is not the kubelet's, and says nothing of it.
const ClientPrefix = "@csi-registrar-"

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
	told := p.announced
	own := strings.HasPrefix(c.RemoteAddr().String(), ClientPrefix)
	live := p.live && !own
	if live {
		p.getInfoAt = time.Now()
	}
	s.mu.Unlock()
	if live {
		s.r.folder.watched(p.folder)
		s.log.Debug("the kubelet called GetInfo", "known", told.Endpoint != "")
		s.Hint()
	}
	if told.Endpoint == "" {
		return nil, grpcstatus.Error(codes.Unavailable, "csi-registrar was restarted without its record and has not asked the driver yet")
	}
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: s.name, Endpoint: told.Endpoint, SupportedVersions: told.Versions,
	}, nil
}

// NotifyRegistrationStatus writes down what the kubelet says before it is answered, so
// that a kill -9 in between forgets nothing. It never fails: the kubelet (v1.36)
// deregisters a plugin that does not take its word.
func (service) NotifyRegistrationStatus(ctx context.Context, in *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	c, err := caller(ctx)
	if err != nil {
		return nil, err
	}
	p, s := c.pub, c.pub.s
	word := status.Notification{At: time.Now(), Registered: in.GetPluginRegistered()}
	if !word.Registered {
		word.Error = safetext.Clean(in.GetError(), maxRefusal)
	}
	s.mu.Lock()
	live := p.live
	if live { // else it speaks of what was published before
		p.word = word
		if word.Registered {
			s.accepted++
			if p.firstYesAt.IsZero() {
				p.firstYesAt = word.At
			}
		} else {
			s.refusals++
		}
	}
	s.mu.Unlock()
	s.log.Debug("the kubelet called NotifyRegistrationStatus", "registered", word.Registered, "error", word.Error, "current", live)
	if live {
		if err := s.save(p); err != nil {
			s.log.Warn("cannot write down what the kubelet said", "error", err)
		}
		s.Hint()
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}
