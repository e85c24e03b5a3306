package regsocket

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// kubelet is a client like the kubelet.
type kubelet struct {
	cc *grpc.ClientConn
	registerapi.RegistrationClient
}

func dialAsKubelet(t testing.TB, path string) *kubelet {
	t.Helper()
	cc, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return &kubelet{cc, registerapi.NewRegistrationClient(cc)}
}

func (k *kubelet) getInfo(t *testing.T) (*registerapi.PluginInfo, error) {
	t.Helper()
	// The kubelet waits 1 s, but this machine may be busy.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return k.GetInfo(ctx, &registerapi.InfoRequest{})
}

func (k *kubelet) notify(t *testing.T, ok bool, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := k.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: ok, Error: text}); err != nil {
		t.Fatalf("Notify: %v", err)
	}
}

// mustAnswer calls GetInfo once over a new connection.
func mustAnswer(t *testing.T, path, endpoint string) {
	t.Helper()
	k := dialAsKubelet(t, path)
	defer k.cc.Close()
	info, err := k.getInfo(t)
	if err != nil {
		t.Fatalf("GetInfo at %s: %v", path, err)
	}
	if info.Endpoint != endpoint {
		t.Fatalf("GetInfo at %s tells %q, want %q", path, info.Endpoint, endpoint)
	}
}
