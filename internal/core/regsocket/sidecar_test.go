package regsocket

import (
	"context"
	"net"
	"testing"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// listen creates a socket of somebody else. It is closed at the end, but its file stays.
func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { l.Close() })
	return l
}

// deadSocket leaves a socket that refuses connections.
func deadSocket(t *testing.T, path string) {
	t.Helper()
	listen(t, path).Close()
}

// sidecar is another registrar.
type sidecar struct {
	registerapi.UnimplementedRegistrationServer
	info  *registerapi.PluginInfo
	hang  chan struct{} // if not nil, GetInfo waits for it
	asked chan struct{}
}

func (s *sidecar) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	select {
	case s.asked <- struct{}{}:
	default:
	}
	if s.hang != nil {
		select {
		case <-s.hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.info, nil
}

func serveSidecar(t *testing.T, path, kind, name string, change ...func(*sidecar)) *sidecar {
	t.Helper()
	sc := &sidecar{info: &registerapi.PluginInfo{Type: kind, Name: name, Endpoint: "/x", SupportedVersions: []string{"1.0.0"}}, asked: make(chan struct{}, 100)}
	for _, c := range change {
		c(sc)
	}
	serve(t, listen(t, path), sc)
	return sc
}

func serve(t *testing.T, l net.Listener, sc *sidecar) {
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, sc)
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done })
}
