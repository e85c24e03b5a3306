package regsocket

import (
	"context"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
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
	if err := grpc.SetHeader(ctx, metadata.Pairs(pluginreg.StoreHeader, store)); err != nil {
		s.log.Debug("the answer to GetInfo does not say who answers", "error", err)
	}
	s.mu.Lock()
	a := p.Announced
	live := p == s.current.Load() && !strings.HasPrefix(c.RemoteAddr().String(), unixsock.ClientPrefix)
	if live {
		p.GetInfoAt = time.Now()
		p.unsaved.Store(true) // Check writes it, for the next process
	}
	s.mu.Unlock()
	if live {
		s.r.dir.watched(p.dir)
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
