package regsocket

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

// The values in these tests are those that are promised, not the constants of the server.

// memoryListener is a listener without a socket, for virtual time.
type memoryListener struct {
	conns chan net.Conn
	ended chan struct{}
	once  sync.Once
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ended:
		return nil, net.ErrClosed
	}
}
func (l *memoryListener) Close() error { l.once.Do(func() { close(l.ended) }); return nil }
func (*memoryListener) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }
func (*memoryListener) SyscallConn() (syscall.RawConn, error) {
	return nil, errors.ErrUnsupported
}

func (l *memoryListener) dial() net.Conn {
	ours, theirs := net.Pipe()
	l.conns <- theirs
	return ours
}

// serveInMemory serves a registration socket with the server that is shipped, whose callers all
// have the credentials cred.
func serveInMemory(t *testing.T, log io.Writer, cred unixsock.Cred) (*Socket, *memoryListener) {
	host := newHost()
	host.PeerCred = func(net.Conn) (unixsock.Cred, error) { return cred, nil }
	r := &Registry{o: Options{Host: host}, dir: &directory{}, callers: &callers{TransportCredentials: insecure.NewCredentials()}}
	r.server = host.NewServer(r.callers)
	registerapi.RegisterRegistrationServer(r.server, service{})
	s := &Socket{r: r, name: "a", log: slog.New(slog.NewTextHandler(log, nil)), watch: make(hints, 1)}
	l := &memoryListener{conns: make(chan net.Conn), ended: make(chan struct{})}
	p := newListener(s, l, record{})
	s.current.Store(p)
	p.serve()
	t.Cleanup(func() {
		p.stop()
		r.Close(context.Background())
	})
	return s, l
}

func TestLimitSilentCallers(t *testing.T) {
	const handshake, idle = 10 * time.Second, 3 * time.Minute
	settings := preface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	for name, c := range map[string]struct {
		say  string
		from time.Duration // when the connection is closed
		to   time.Duration
	}{
		"silent":         {"", handshake, handshake},
		"half a preface": {preface[:10], handshake, handshake},
		"preface only":   {preface, handshake, handshake},
		"noise":          {"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 0, 0},
		// gRPC waits for the answer to its GOAWAY before it closes the connection.
		"no call":               {settings, idle, idle + time.Minute},
		"a frame that is begun": {settings + "\x00\x40\x00\x00\x00\x00\x00\x00\x01", idle, idle + time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, l := serveInMemory(t, io.Discard, unixsock.Cred{})
				begin, conn := time.Now(), l.dial()
				defer conn.Close()
				go io.WriteString(conn, c.say)
				_, _ = io.Copy(io.Discard, conn)
				if d := time.Since(begin); d < c.from || d > c.to {
					t.Errorf("closed after %v, want %v to %v", d, c.from, c.to)
				}
			})
		})
	}
}

// The kubelet keeps its connection while it waits for the driver's NodeGetInfo.
func TestLimitIdleCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l := serveInMemory(t, io.Discard, unixsock.Cred{})
		cc, err := grpcconn.New(l.dial(), 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		if _, err := registerapi.NewRegistrationClient(cc).GetInfo(t.Context(), &registerapi.InfoRequest{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3*time.Minute - time.Millisecond)
		synctest.Wait()
		if n := connectionsOf(s); n != 1 {
			t.Errorf("%d connections 3 minutes after a call", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if n := connectionsOf(s); n != 0 {
			t.Errorf("%d connections later", n)
		}
	})
}

// A caller that is not root is refused before the server reads or writes.
func TestLimitCallersToRoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &fake.Buffer{}
		s, l := serveInMemory(t, log, unixsock.Cred{PID: 7, UID: 12345})
		for range 3 {
			conn := l.dial()
			// A write to a pipe returns when it was read.
			n, err := io.WriteString(conn, preface)
			if m, readErr := io.Copy(io.Discard, conn); n+int(m) > 0 || err == nil || readErr != nil {
				t.Errorf("it read %d bytes and wrote %d: %v, %v", n, m, err, readErr)
			}
			conn.Close()
		}
		if n := strings.Count(log.String(), "uid=12345 pid=7"); n != 1 || connectionsOf(s) != 0 {
			t.Errorf("logged %d times, %d connections:\n%s", n, connectionsOf(s), log)
		}
	})
}

// Of many connections the last one stays. The oldest is closed when another one is accepted, before
// any handshake: those run side by side, and nothing limits how many wait.
func TestLimitKeepsTheLastCaller(t *testing.T) {
	cs := &callers{}
	l := &listener{s: &Socket{r: &Registry{callers: cs}}}
	var all []*caller
	for range 65 {
		_, c := net.Pipe()
		all = append(all, cs.accept(l, c))
		if open := len(cs.open[l.s]); open > 64 {
			t.Errorf("%d connections are open", open)
		}
	}
	if left := cs.open[l.s]; !slices.Equal(left, all[1:]) {
		t.Errorf("%d are left, and not the newest", len(left))
	}
}

// The cost of a connection does not grow with the connections of other sockets: the kubelet calls
// all of them at once.
func TestAcceptingCostsTheSameWithManySockets(t *testing.T) {
	cs := &callers{}
	r := &Registry{callers: cs}
	accept := func() {
		_, c := net.Pipe()
		cs.accept(&listener{s: &Socket{r: r}}, c)
	}
	var before, after runtime.MemStats
	for range 2000 {
		accept()
	}
	runtime.ReadMemStats(&before)
	for range 100 {
		accept()
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / 100; each > 5000 {
		t.Errorf("%d bytes for each", each)
	}
}

// The server tells a client its limits (RFC 9113, 6.5.2).
func TestLimitStreamsAndHeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, l := serveInMemory(t, io.Discard, unixsock.Cred{})
		conn := l.dial()
		defer conn.Close()
		head := make([]byte, 9) // length (3), type, flags, stream
		if _, err := io.ReadFull(conn, head); err != nil || head[3] != 4 {
			t.Fatalf("frame % x, %v", head, err)
		}
		body := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(conn, body); err != nil {
			t.Fatal(err)
		}
		got := map[uint16]uint32{}
		for ; len(body) >= 6; body = body[6:] {
			got[binary.BigEndian.Uint16(body)] = binary.BigEndian.Uint32(body[2:])
		}
		const streams, window, frame, headers = 3, 4, 5, 6
		want := map[uint16]uint32{streams: 4, window: 64 << 10, frame: 16 << 10, headers: 8 << 10}
		if !maps.Equal(got, want) {
			t.Errorf("settings %v, want %v", got, want)
		}
	})
}

func TestLimitMessages(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	k := dialAsKubelet(t, s.path)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := k.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{Error: strings.Repeat("x", 64<<10)}); err == nil {
		t.Error("a message of more than 64 KiB was accepted")
	}
	text := strings.Repeat("x", 64<<10-100)
	k.notify(t, false, text)
	if got := look(t, s).Notification.Error; got != safetext.Clean(text, 1000) {
		t.Errorf("%d bytes of the error are kept", len(got))
	}
}
