package regsocket

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
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
func newServer(creds credentials.TransportCredentials) Server {
	return grpc.NewServer(
		grpc.Creds(creds),
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

// service implements the kubelet's calls.
type service struct {
	registerapi.UnimplementedRegistrationServer
}

// GetInfo answers from memory: the kubelet waits 1 s for it.
func (service) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	c := callerOf(ctx)
	p, s := c.listener, c.listener.s
	store := pluginreg.NoStore
	if s.r.o.KeepSockets {
		store = pluginreg.HasStore
	}
	_ = grpc.SetHeader(ctx, metadata.Pairs(pluginreg.StoreHeader, store)) // fails with the call
	s.mu.Lock()
	a := p.Announced
	live := p == s.current.Load() && !strings.HasPrefix(c.RemoteAddr().String(), unixsock.ClientPrefix)
	if live {
		p.GetInfoAt = time.Now()
		p.unsaved.Store(true) // Check writes it, for the next process
	}
	s.mu.Unlock()
	if live {
		s.r.dir.called()
		s.log.Debug("the kubelet called GetInfo", "pid", c.peer.PID)
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
	c := callerOf(ctx)
	p, s := c.listener, c.listener.s
	if s.r.o.Process != nil {
		s.r.o.Process.confirmed(c.Conn)
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
	s.log.Debug("the kubelet called NotifyRegistrationStatus", "pid", c.peer.PID, "registered", n.Registered, "error", n.Error, "current", live)
	if live {
		if err := s.save(p); err != nil {
			s.log.Warn("cannot record what the kubelet reported", "error", err)
		}
		s.watch.Hint()
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

// maxCallers is the number of connections that a registration socket keeps open. Only root can
// connect, and the kubelet makes one connection at a time.
const maxCallers = 64

// caller is an accepted connection to a registration socket. It is also gRPC's AuthInfo, from which
// a handler learns which socket was called, and by which process.
type caller struct {
	net.Conn
	listener *listener
	peer     unixsock.Cred
}

// AuthType implements credentials.AuthInfo.
func (*caller) AuthType() string { return "SO_PEERCRED" }

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

// close closes all connections.
func (cs *callers) close() {
	cs.mu.Lock()
	open := slices.Concat(slices.Collect(maps.Values(cs.open))...)
	cs.mu.Unlock()
	for _, c := range open {
		c.Close()
	}
}

// callerOf returns the connection of a call: ServerHandshake made its AuthInfo.
func callerOf(ctx context.Context) *caller {
	p, _ := peer.FromContext(ctx)
	return p.AuthInfo.(*caller)
}
