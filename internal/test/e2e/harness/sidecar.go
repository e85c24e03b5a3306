package harness

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Sidecar imitates node-driver-registrar 2.18: it asks the driver for its name once, removes
// whatever is at its registration path, listens there and answers. At SIGTERM it removes the path,
// after SIGKILL the path stays.
type Sidecar struct {
	t      testing.TB
	path   string
	info   *registerapi.PluginInfo
	server *grpc.Server
	done   chan struct{}

	mu   sync.Mutex
	said []*registerapi.RegistrationStatus

	registerapi.UnsafeRegistrationServer
}

// StartSidecar starts a sidecar for the driver that listens at socket.
func (n *Node) StartSidecar(socket string) *Sidecar {
	n.T.Helper()
	ctx, cancel := context.WithTimeout(n.T.Context(), 5*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.T.Fatal(err)
	}
	defer conn.Close()
	who, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		n.T.Fatalf("sidecar: %v", err)
	}
	s := n.SidecarAt(n.RegSocket(who.GetName()), who.GetName(), socket)
	return s
}

// SidecarAt serves a registration at any path, without asking a driver.
func (n *Node) SidecarAt(path, name, endpoint string) *Sidecar {
	n.T.Helper()
	s := &Sidecar{
		t: n.T, path: path, server: grpc.NewServer(), done: make(chan struct{}),
		info: &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: name, Endpoint: endpoint, SupportedVersions: []string{"1.0.0"}},
	}
	lis, err := steal(path)
	for range 20 {
		if !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		lis, err = steal(path) // another process was faster; the real sidecar would exit
	}
	if err != nil {
		n.T.Fatalf("sidecar: %v", err)
	}
	registerapi.RegisterRegistrationServer(s.server, s)
	go s.serve(lis)
	n.T.Cleanup(s.Kill)
	return s
}

// steal removes any file at the path and listens there.
func steal(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return listen(path)
}

func (s *Sidecar) serve(lis net.Listener) {
	defer close(s.done)
	if err := s.server.Serve(lis); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		s.t.Logf("sidecar: %v", err)
	}
}

// Stop ends the sidecar as SIGTERM does.
func (s *Sidecar) Stop() {
	s.t.Helper()
	if err := os.Remove(s.path); err != nil {
		s.t.Errorf("sidecar: %v", err)
	}
	s.Kill()
}

// Kill ends the sidecar as SIGKILL does: the dead socket stays.
func (s *Sidecar) Kill() {
	s.server.Stop()
	<-s.done
}

// Said returns what the kubelet has reported to the sidecar.
func (s *Sidecar) Said() []*registerapi.RegistrationStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.said
}

// GetInfo implements registerapi.RegistrationServer.
func (s *Sidecar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return s.info, nil
}

// NotifyRegistrationStatus implements registerapi.RegistrationServer.
func (s *Sidecar) NotifyRegistrationStatus(_ context.Context, st *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = append(s.said, st)
	return &registerapi.RegistrationStatusResponse{}, nil
}
