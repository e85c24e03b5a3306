package driver

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

const name = "nfs.csi.example.com"

// fakeDriver is a driver with configurable answers; nil: the answer of a healthy driver.
type fakeDriver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	mu     sync.Mutex
	info   func(context.Context) (*csi.GetPluginInfoResponse, error)
	ready  func(context.Context) (*csi.ProbeResponse, error)
	node   func(context.Context) (*csi.NodeGetInfoResponse, error)
	calls  map[string]int
	silent bool // no node service
}

func (f *fakeDriver) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeDriver) called(method string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[method]
}

func answer[T any](f *fakeDriver, ctx context.Context, method string, pick func() func(context.Context) (T, error), good T) (T, error) {
	f.mu.Lock()
	if f.calls == nil {
		f.calls = map[string]int{}
	}
	f.calls[method]++
	do := pick()
	f.mu.Unlock()
	if do == nil {
		return good, nil
	}
	return do(ctx)
}

func (f *fakeDriver) GetPluginInfo(ctx context.Context, _ *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return answer(f, ctx, "GetPluginInfo", func() func(context.Context) (*csi.GetPluginInfoResponse, error) { return f.info },
		&csi.GetPluginInfoResponse{Name: name, VendorVersion: "v4.2"})
}

func (f *fakeDriver) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return answer(f, ctx, "Probe", func() func(context.Context) (*csi.ProbeResponse, error) { return f.ready },
		&csi.ProbeResponse{Ready: wrapperspb.Bool(true)})
}

func (f *fakeDriver) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return answer(f, ctx, "NodeGetInfo", func() func(context.Context) (*csi.NodeGetInfoResponse, error) { return f.node },
		&csi.NodeGetInfoResponse{NodeId: "node-1", MaxVolumesPerNode: 7, AccessibleTopology: &csi.Topology{Segments: map[string]string{"topology.example.com/zone": "a"}}})
}

// serve serves f on l, and returns a function that ends it as a kill does: connections break.
func (f *fakeDriver) serve(l net.Listener) (stop func()) {
	s := grpc.NewServer()
	csi.RegisterIdentityServer(s, f)
	if !f.silent {
		csi.RegisterNodeServer(s, f)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	return func() { s.Stop(); <-done }
}

func hang[T any](ctx context.Context) (T, error) {
	<-ctx.Done()
	var zero T
	return zero, grpcstatus.FromContextError(ctx.Err()).Err()
}

func fails[T any](code codes.Code, message string) func(context.Context) (T, error) {
	return func(context.Context) (T, error) {
		var zero T
		return zero, grpcstatus.Error(code, message)
	}
}

func says[T any](v T) func(context.Context) (T, error) {
	return func(context.Context) (T, error) { return v, nil }
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// listen binds and listens; closing leaves the file behind, as a kill does.
func listen(t testing.TB, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { l.Close() })
	return l
}

// start serves a fake at path until the test or the returned function ends it.
func start(t testing.TB, path string, f *fakeDriver) (stop func()) {
	t.Helper()
	stop = sync.OnceFunc(f.serve(listen(t, path)))
	t.Cleanup(stop)
	return stop
}

// box is a rate.Hinter without a source.
type box chan struct{}

func (b box) Hints() <-chan struct{} { return b }
func (b box) Close()                 {}

func (b box) Hint() {
	select {
	case b <- struct{}{}:
	default:
	}
}

// client returns a client that is closed at the end of the test, and checks that it leaves nothing
// behind.
func client(t testing.TB, cfg config.Connection, hints rate.Hinter) *Client {
	t.Helper()
	return clientWith(t, cfg, hints, worker.NewPool())
}

func clientWith(t testing.TB, cfg config.Connection, hints rate.Hinter, pool *worker.Pool) *Client {
	t.Helper()
	if hints == nil {
		hints = make(box, 1)
	}
	goroutines, descriptors := runtime.NumGoroutine(), fake.Descriptors(t)
	cfg.Endpoint, cfg.Timeout = cmp.Or(cfg.Endpoint, cfg.Socket), cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.SocketOwner = cmp.Or(cfg.SocketOwner, "root")
	c := New(cfg, slog.New(slog.DiscardHandler), hints, pool)
	c.lookLimit = 20 * time.Second // of a machine that is slow, but not dead
	t.Cleanup(func() {
		c.Close()
		for range 1000 {
			if runtime.NumGoroutine() <= goroutines && fake.Descriptors(t) <= descriptors {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		buf := make([]byte, 1<<16)
		t.Errorf("left behind: %d goroutines (were %d), %d descriptors (were %d)\n%s",
			runtime.NumGoroutine(), goroutines, fake.Descriptors(t), descriptors, buf[:runtime.Stack(buf, true)])
	})
	return c
}

func ask(t testing.TB, c *Client) status.Report {
	t.Helper()
	return c.Ask(t.Context(), Due, nil)
}

func expectHint(t testing.TB, c *Client, what string) time.Duration {
	t.Helper()
	begun := time.Now()
	select {
	case <-c.Hints():
	case <-time.After(20 * time.Second):
		t.Fatalf("no hint: %s", what)
	}
	return time.Since(begun)
}

func expectQuiet(t testing.TB, c *Client, what string) {
	t.Helper()
	select {
	case <-c.Hints():
		t.Fatalf("a hint: %s", what)
	case <-time.After(30 * time.Millisecond):
	}
}

func expectReady(t testing.TB, r status.Report) {
	t.Helper()
	want := status.Identity{Name: name, Version: "v4.2", NodeID: "node-1", MaxVolumes: 7, Topology: map[string]string{"topology.example.com/zone": "a"}}
	if r.Driver != status.Ready || r.Reason != "" || !r.Identity.Equal(want) {
		t.Fatalf("report %+v, want ready", r)
	}
}

func paths(t testing.TB) (dir, socket string) {
	t.Helper()
	dir = fake.ShortDir(t)
	return dir, filepath.Join(dir, "csi.sock")
}
