package flood

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The frames of HTTP/2 (RFC 9113, section 6).
const (
	data = iota
	headers
	priority
	rstStream
	settings
	pushPromise
	ping
	goAway
	windowUpdate
	continuation
)

const (
	ack        = 1 // flag of SETTINGS and PING
	endHeaders = 4 // flag of HEADERS
)

func frame(kind, flags byte, stream uint32, payload ...byte) []byte {
	b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

// answer begins the answer to the first call of a connection: status 200, content type of gRPC.
var answer = frame(headers, endHeaders, 1, append([]byte{0x88, 0x5f, 16}, "application/grpc"...)...)

// oneOf is a frame of each kind that may come at any time.
func oneOf() []byte {
	return slices.Concat(
		frame(ping, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8),
		frame(settings, 0, 0, 0, 4, 0, 0, 0xff, 0xff),
		frame(windowUpdate, 0, 0, 0, 0, 0, 1),
		frame(windowUpdate, 0, 1, 0, 0, 0, 1),
		frame(priority, 0, 3, 0, 0, 0, 1, 9),
		frame(0x42, 0, 0, []byte("of no kind there is")...),
	)
}

// pours returns what speaks HTTP/2 and then says the same without end.
func pours(first, always []byte) func(*hostile, net.Conn) {
	block := bytes.Repeat(always, 1+(16<<10)/len(always))
	return func(_ *hostile, c net.Conn) {
		go io.Copy(io.Discard, c) // ends with the connection
		_, err := c.Write(append(frame(settings, 0, 0), first...))
		for err == nil {
			_, err = c.Write(block)
		}
	}
}

// trickles returns what answers well, and then says the same without end: so many bytes at a
// time, so often.
func trickles(what []byte, n int, every time.Duration) func(*hostile, net.Conn) {
	return func(h *hostile, c net.Conn) {
		quiet := &framed{Conn: c, closed: make(chan struct{})}
		h.good.conns <- quiet
		select {
		case <-time.After(300 * time.Millisecond): // the three answers are given by then, or never
		case <-quiet.closed:
			return
		}
		quiet.mu.Lock() // from now on the server of gRPC is not heard
		defer quiet.mu.Unlock()
		tick := time.NewTicker(max(every, time.Microsecond))
		defer tick.Stop()
		for at := 0; ; at += n {
			if every > 0 {
				<-tick.C
			}
			at %= len(what)
			if _, err := c.Write(what[at:min(at+n, len(what))]); err != nil {
				return
			}
		}
	}
}

// framed is a connection that its server can be kept from writing to.
type framed struct {
	net.Conn
	mu     sync.Mutex
	once   sync.Once
	closed chan struct{}
}

func (f *framed) Write(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Conn.Write(b)
}

func (f *framed) Close() error {
	f.once.Do(func() { close(f.closed) })
	return f.Conn.Close()
}

// behaviours are what a hostile driver does with a connection, until it ends.
var behaviours = []struct {
	name string
	do   func(*hostile, net.Conn)
}{
	{"hangs up", func(_ *hostile, c net.Conn) { c.Close() }},
	{"says nothing", func(_ *hostile, c net.Conn) { io.Copy(io.Discard, c) }},
	{"does not even read", func(h *hostile, _ net.Conn) { <-h.stop }},
	{"speaks HTTP/1", func(_ *hostile, c net.Conn) {
		io.WriteString(c, strings.Repeat("HTTP/1.1 400 Bad Request\r\n\r\n", 1000))
		io.Copy(io.Discard, c)
	}},
	{"random bytes", func(_ *hostile, c net.Conn) {
		io.Copy(c, rand.NewChaCha8([32]byte{1}))
	}},
	{"PING", pours(nil, frame(ping, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8))},
	{"answers to no PING", pours(nil, frame(ping, ack, 0, 1, 2, 3, 4, 5, 6, 7, 8))},
	{"SETTINGS", pours(nil, frame(settings, 0, 0))},
	{"SETTINGS of everything", pours(nil, frame(settings, 0, 0,
		0, 1, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff, 0, 5, 0, 0xff, 0xff, 0xff, 0, 6, 0, 0, 0, 0))},
	{"WINDOW_UPDATE", pours(nil, frame(windowUpdate, 0, 0, 0, 0, 0, 1))},
	{"RST_STREAM", pours(nil, frame(rstStream, 0, 1, 0, 0, 0, 8))},
	{"GOAWAY", pours(nil, frame(goAway, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0))},
	{"GOAWAY at once", pours(frame(goAway, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), frame(ping, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8))},
	{"PUSH_PROMISE", pours(nil, frame(pushPromise, endHeaders, 1, 0, 0, 0, 2, 0x82))},
	{"all kinds of frames", pours(nil, oneOf())},
	{"headers that do not end", pours(frame(headers, 0, 1, 0x88), frame(continuation, 0, 1, bytes.Repeat([]byte{0x82}, 16<<10)...))},
	{"one huge header", pours(frame(headers, 0, 1, 0x88, 0, 1, 'x', 0x7f, 0xff, 0xff, 0x3f), frame(continuation, 0, 1, make([]byte, 16<<10)...))},
	{"answers without end", pours(nil, answer)},
	{"data that does not end", pours(append(answer, frame(data, 0, 1, 0, 0xff, 0xff, 0xff, 0xff)...), frame(data, 0, 1, make([]byte, 16<<10)...))},
	{"data of nothing", pours(answer, frame(data, 0, 1))},
	{"data on a stream that is not there", pours(nil, frame(data, 0, 0x7fffffff, make([]byte, 1<<10)...))},
	{"a frame of 16 MiB", pours([]byte{0xff, 0xff, 0xff, data, 0, 0, 0, 0, 1}, make([]byte, 64<<10))},
	{"ready, then PING", trickles(bytes.Repeat(frame(ping, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8), 1000), 17000, 0)},
	{"ready, then each kind of frame by itself", trickles(oneOf(), len(oneOf()), time.Millisecond)},
	{"ready, then byte by byte", trickles(frame(ping, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8), 1, 0)},
	{"ready, then gone", func(h *hostile, c net.Conn) {
		h.good.conns <- c
		select {
		case <-time.After(300 * time.Millisecond):
		case <-h.stop:
		}
		c.Close()
	}},
	{"answers that change", func(h *hostile, c net.Conn) {
		done := &framed{Conn: c, closed: make(chan struct{})}
		h.fickle.conns <- done
		select {
		case <-done.closed:
		case <-time.After(5 * time.Second):
			c.Close()
		case <-h.stop:
		}
	}},
}

// hostile is a driver that does everything that there is to do to a registrar.
type hostile struct {
	name, dir, socket string
	stop              chan struct{}
	running           sync.WaitGroup
	listener          net.Listener
	good, fickle      *served
	turn              atomic.Int64 // the behaviour of the next connection
	calls             atomic.Int64
	asked             atomic.Int64 // connections
}

// served is a gRPC server for given connections.
type served struct {
	server *grpc.Server
	conns  chan net.Conn
	stop   chan struct{}
}

func (s *served) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.stop:
		return nil, net.ErrClosed
	}
}
func (s *served) Close() error   { return nil }
func (s *served) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }

// start has hostile driver i listen. The first connection gets behaviour first.
func start(root string, i, first int) (*hostile, error) {
	h := &hostile{name: fmt.Sprintf("bad%d.example", i), stop: make(chan struct{})}
	h.dir = filepath.Join(root, h.name)
	h.socket = filepath.Join(h.dir, "csi.sock")
	h.turn.Store(int64(first))
	if err := os.Mkdir(h.dir, 0o755); err != nil {
		return nil, err
	}
	var err error
	if h.listener, err = listen(h.socket); err != nil {
		return nil, err
	}
	h.good, h.fickle = h.serve(&healthy{name: h.name}), h.serve(&changing{healthy: healthy{name: h.name}, calls: &h.calls})
	h.running.Go(h.accept)
	return h, nil
}

func listen(path string) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		l.SetUnlinkOnClose(false)
	}
	return l, err
}

type services interface {
	csi.IdentityServer
	csi.NodeServer
}

func (h *hostile) serve(s services) *served {
	on := &served{server: grpc.NewServer(), conns: make(chan net.Conn), stop: h.stop}
	csi.RegisterIdentityServer(on.server, s)
	csi.RegisterNodeServer(on.server, s)
	h.running.Go(func() { _ = on.server.Serve(on) })
	return on
}

func (h *hostile) accept() {
	for {
		c, err := h.listener.Accept()
		if err != nil {
			return
		}
		h.asked.Add(1)
		b := behaviours[(h.turn.Add(1)-1)%int64(len(behaviours))]
		h.running.Go(func() {
			ended := make(chan struct{})
			go func() {
				select {
				case <-h.stop:
				case <-ended:
				}
				c.Close()
			}()
			b.do(h, c)
			close(ended)
		})
	}
}

// flap changes the mode of the driver's directory, so that it is trusted and not, and puts its
// socket away and back, as often as it can.
func (h *hostile) flap(ctx context.Context, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	aside := h.socket + ".aside"
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		var err error
		switch i % 8 {
		case 0, 4:
			err = os.Chmod(h.dir, 0o777)
		case 6:
			err = os.Rename(h.socket, aside)
		case 7:
			err = os.Rename(aside, h.socket)
		default:
			err = os.Chmod(h.dir, 0o755)
		}
		if err != nil {
			return err
		}
	}
}

func (h *hostile) end() error {
	close(h.stop)
	err := h.listener.Close()
	h.good.server.Stop()
	h.fickle.server.Stop()
	h.running.Wait()
	return err
}

// healthy answers as a driver that is ready.
type healthy struct {
	name string
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
}

func (d *healthy) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (d *healthy) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (d *healthy) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "n"}, nil
}

// changing never says the same twice.
type changing struct {
	healthy
	calls *atomic.Int64
}

// spoil is what is wrong with an answer; nil: nothing.
func (d *changing) spoil(ctx context.Context) error {
	n := d.calls.Add(1)
	text := fmt.Sprintf("%d \x1b[2J run \"curl x | sh\"\n%s", n, strings.Repeat("x", int(n%2000)))
	switch n % 7 {
	case 0:
		return status.Error(codes.Code(1+n/7%16), text)
	case 1:
		return grpc.SetTrailer(ctx, metadata.Pairs("x", strings.Repeat("y", 1<<20)))
	case 2:
		return grpc.SetHeader(ctx, metadata.Pairs(slices.Repeat([]string{"x", text}, 500)...))
	}
	return nil
}

func (d *changing) GetPluginInfo(ctx context.Context, _ *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	answer := &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: fmt.Sprint(d.calls.Load())}
	switch d.calls.Load() % 5 {
	case 0:
		answer.Name = fmt.Sprintf("x%d.example", d.calls.Load())
	case 1:
		answer.Manifest = map[string]string{"x": strings.Repeat("y", 1<<20)}
	case 2:
		answer.VendorVersion = strings.Repeat("\x1b[2J", 40<<10)
	}
	return answer, d.spoil(ctx)
}

func (d *changing) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(d.calls.Load()%5 != 0)}, d.spoil(ctx)
}

func (d *changing) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	n := d.calls.Load()
	answer := &csi.NodeGetInfoResponse{NodeId: fmt.Sprint("n", n), MaxVolumesPerNode: n, AccessibleTopology: &csi.Topology{Segments: map[string]string{}}}
	for i := range n % 200 {
		answer.AccessibleTopology.Segments[fmt.Sprintf("k%d/%d", n, i)] = fmt.Sprint("v", n)
	}
	return answer, d.spoil(ctx)
}
