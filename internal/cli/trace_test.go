package cli

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/test/fake"
)

// A call that is pending when a trace is ended still gets its answer: the kubelet waits for it for
// up to two minutes.
func TestTraceForwardsPendingCallsAtItsEnd(t *testing.T) {
	t.Parallel() // it mostly waits
	dir := fake.ShortDir(t)
	called, answer := make(chan struct{}), make(chan struct{})
	hold := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		close(called)
		<-answer
		return handle(ctx, req)
	}
	d := fake.NewDriver(filepath.Join(dir, "s"), fake.Healthy("a.example"), grpc.UnaryInterceptor(hold))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)

	ctx, interrupt := context.WithCancel(t.Context())
	s, code := newSession(), make(chan int, 1)
	listen := filepath.Join(dir, "l")
	go func() { code <- s.run(ctx, "trace", "--listen", listen, "--connect", d.Socket) }()
	s.stdout.await(t, "CALL") // it listens

	cc, err := grpc.NewClient("unix:"+listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	answered := make(chan error, 1)
	go func() {
		_, err := csi.NewNodeClient(cc).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		cc.Close() // an idle connection would be waited for
		answered <- err
	}()
	<-called
	interrupt()
	s.stderr.await(t, "waiting for pending calls")
	close(answer)
	if err := <-answered; err != nil {
		t.Errorf("the pending call: %v", err)
	}
	if got := <-code; got != 0 || !strings.Contains(s.stdout.String(), "NodeGetInfo") {
		t.Errorf("exit code %d, %q, %q", got, s.stdout, s.stderr)
	}
}
