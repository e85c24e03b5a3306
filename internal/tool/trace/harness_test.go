package trace

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"csi-registrar/internal/test/fake"
)

// waitLimit is how long a test waits for what has to come.
const waitLimit = time.Minute

// socketDir returns a directory with a short path.
func socketDir(t testing.TB) string { return fake.ShortDir(t) }

func listen(t testing.TB, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// dialTo dials a Unix socket.
func dialTo(path string) Dial {
	return func(ctx context.Context) (Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		return c.(Conn), nil
	}
}

// answerer answers all calls of a driver: the method without its service.
type answerer func(ctx context.Context, method string, request proto.Message) (proto.Message, error)

// csiServer has all services of CSI that have unary calls.
type csiServer struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
}

// serveCSI serves a driver at path.
func serveCSI(t testing.TB, path string, answer answerer) {
	t.Helper()
	s := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
		return answer(ctx, info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:], req.(proto.Message))
	}))
	csi.RegisterIdentityServer(s, csiServer{})
	csi.RegisterNodeServer(s, csiServer{})
	csi.RegisterControllerServer(s, csiServer{})
	csi.RegisterGroupControllerServer(s, csiServer{})
	l := listen(t, path)
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) }) // it ends with Stop
	t.Cleanup(func() { s.Stop(); serving.Wait() })
}

// connect is a client's connection.
func connect(t testing.TB, path string) *grpc.ClientConn {
	t.Helper()
	c, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// proxy is a Serve that runs until the end of the test, or stop.
type proxy struct {
	t       testing.TB
	rec     *Recorder
	path    string
	cancel  context.CancelFunc
	cut     context.CancelFunc
	ended   chan struct{}
	mu      sync.Mutex
	calls   []Call
	changed chan struct{}
}

// startProxy records what goes to a driver at the path.
func startProxy(t testing.TB, driver string, show []string) *proxy {
	t.Helper()
	return startProxyAt(t, driver, show, time.Now)
}

// startProxyAt is startProxy with a clock.
func startProxyAt(t testing.TB, driver string, show []string, now func() time.Time) *proxy {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cut, stop := context.WithCancel(context.Background())
	p := &proxy{t: t, rec: NewRecorder(show), path: filepath.Join(socketDir(t), "t"), cancel: cancel, cut: stop,
		ended: make(chan struct{}), changed: make(chan struct{}, 1)}
	p.rec.now = now
	l := listen(t, p.path)
	served := make(chan error, 1)
	go func() {
		served <- Serve(ctx, cut, l, dialTo(driver), p.rec)
		p.rec.Close()
	}()
	go func() {
		defer close(p.ended)
		for c := range p.rec.Calls() {
			p.mu.Lock()
			p.calls = append(p.calls, c)
			p.mu.Unlock()
			select {
			case p.changed <- struct{}{}:
			default:
			}
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(p.stop)
	return p
}

// stop ends the proxy at once.
func (p *proxy) stop() {
	p.cancel()
	p.cut()
	<-p.ended
}

// wait waits for so many calls, and returns all.
func (p *proxy) wait(n int) []Call {
	p.t.Helper()
	late := time.After(waitLimit)
	for {
		p.mu.Lock()
		calls := p.calls
		p.mu.Unlock()
		if len(calls) >= n {
			return calls
		}
		select {
		case <-p.changed:
		case <-late:
			p.t.Fatalf("%d calls recorded, want %d", len(calls), n)
		}
	}
}

// methodNamed is a method of CSI and its descriptor.
func methodNamed(t testing.TB, name string) (full string, m protoreflect.MethodDescriptor) {
	t.Helper()
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		if m := services.Get(i).Methods().ByName(protoreflect.Name(name)); m != nil {
			return "/" + string(services.Get(i).FullName()) + "/" + name, m
		}
	}
	t.Fatalf("CSI has no method %s", name)
	return "", nil
}

func newMessage(t testing.TB, d protoreflect.MessageDescriptor) proto.Message {
	t.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		t.Fatal(err)
	}
	return kind.New().Interface()
}

func publish(volume, target string) proto.Message {
	return &csi.NodePublishVolumeRequest{VolumeId: volume, TargetPath: target, Secrets: map[string]string{"a": "1", "b": "2", "c": "3", "d": "4"}}
}

func unpublish(volume, target string) proto.Message {
	return &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target}
}

func create(name string) proto.Message { return &csi.CreateVolumeRequest{Name: name} }

// invoke calls a method of CSI by its request's type.
func invoke(t testing.TB, ctx context.Context, c *grpc.ClientConn, name string, request proto.Message) (proto.Message, error) {
	t.Helper()
	full, m := methodNamed(t, name)
	response := newMessage(t, m.Output())
	return response, c.Invoke(ctx, full, request, response)
}

// printed is all that a person or a program can see of a trace.
func printed(t testing.TB, rec *Recorder, calls []Call) string {
	t.Helper()
	var b bytes.Buffer
	table := NewTable(200)
	for _, c := range calls {
		b.WriteString(table.Row(c) + "\n" + c.Error + "\n")
		if err := writeJSON(&b, c); err != nil {
			t.Fatal(err)
		}
	}
	return b.String() + rec.Summary()
}

func writeJSON(b *bytes.Buffer, c Call) error {
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	return enc.Encode(c)
}
