package simulation

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// server stands for gRPC: it accepts connections, and hands the calls on them to the real service.
type server struct {
	p       *process
	creds   credentials.TransportCredentials
	service registerapi.RegistrationServer
	conns   []*conn // under the world's lock
	stopped chan struct{}
	once    sync.Once
}

func newServer(p *process, creds credentials.TransportCredentials) *server {
	return &server{p: p, creds: creds, stopped: make(chan struct{})}
}

func (s *server) RegisterService(_ *grpc.ServiceDesc, service any) {
	s.service = service.(registerapi.RegistrationServer)
}

func (s *server) Serve(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			l.Close()
			return err
		}
		c, info, err := s.creds.ServerHandshake(c)
		if err != nil {
			return err
		}
		var number [1]byte
		_, _ = c.Read(number[:])
		s.p.w.mu.Lock()
		m := s.p.w.conns[number[0]]
		s.conns = append(s.conns, m)
		s.p.conns = append(s.p.conns, m)
		if s.p.dead {
			m.close()
		}
		s.p.w.mu.Unlock()
		go s.serve(c, info, m)
	}
}

func (s *server) serve(c net.Conn, info credentials.AuthInfo, m *conn) {
	defer c.Close()
	ctx := peer.NewContext(context.Background(), &peer.Peer{AuthInfo: info})
	for {
		select {
		case <-m.closed:
			return
		case <-s.stopped:
			s.p.w.mu.Lock()
			m.close()
			s.p.w.mu.Unlock()
			return
		case call := <-m.calls:
			s.p.w.mu.Lock()
			isOpen := m.isOpen
			if isOpen {
				m.sock.answering++
			}
			s.p.w.mu.Unlock()
			if !isOpen { // the kubelet has given up
				return
			}
			var r callReply
			if call.notify == nil {
				var info *registerapi.PluginInfo
				if info, r.err = s.service.GetInfo(ctx, &registerapi.InfoRequest{}); r.err == nil {
					r = callReply{endpoint: info.Endpoint, versions: info.SupportedVersions, name: info.Name}
				}
			} else {
				_, r.err = s.service.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{
					PluginRegistered: call.notify.Registered, Error: call.notify.Error})
			}
			s.p.w.mu.Lock()
			m.sock.answering--
			switch {
			case s.p.dead:
				r.err = errReset
			case r.err != nil:
			case call.notify == nil:
				m.sock.askedAt = time.Now()
			default: // also if the kubelet does not learn that it was heard
				m.sock.forgotten, m.sock.told, m.sock.toldAt = false, call.notify, time.Now()
				s.p.w.of(m.sock.driver).told = m.sock
				if call.notify.Registered && m.sock.acceptedAt.IsZero() {
					m.sock.acceptedAt = time.Now()
				}
			}
			s.p.w.mu.Unlock()
			call.reply <- r
		}
	}
}

// GracefulStop lets calls in flight end; the kubelet's client then connects again.
func (s *server) GracefulStop() { s.once.Do(func() { close(s.stopped) }) }
