package trace

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// pipe is a connection through a proxy: both ends.
func pipe(t *testing.T) (client, driver *net.UnixConn, p *proxy) {
	t.Helper()
	path := filepath.Join(socketDir(t), "d")
	l := listen(t, path)
	p = startProxy(t, path, nil)
	c, err := net.Dial("unix", p.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	d, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return c.(*net.UnixConn), d, p
}

// limited is pipe with a time limit for all that is read and written.
func limited(t *testing.T) (client, driver *net.UnixConn) {
	t.Helper()
	client, driver, _ = pipe(t)
	for _, c := range []*net.UnixConn{client, driver} {
		if err := c.SetDeadline(time.Now().Add(waitLimit)); err != nil {
			t.Fatal(err)
		}
	}
	return client, driver
}

// slowly reads or writes in pieces of random sizes, and pauses at some.
type slowly struct {
	net.Conn
	random *rand.Rand
}

func (s slowly) piece(b []byte) []byte {
	if s.random.IntN(50) == 0 {
		// Slowness is what is tested.
		time.Sleep(time.Duration(s.random.IntN(int(2 * time.Millisecond))))
	}
	return b[:min(len(b), 1+s.random.IntN(100<<10))]
}

func (s slowly) Read(b []byte) (int, error) { return s.Conn.Read(s.piece(b)) }

func (s slowly) Write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		var m int
		m, err = s.Conn.Write(s.piece(b))
		n, b = n+m, b[m:]
	}
	return n, err
}

// Bytes arrive as they were sent, in both directions at once, whether they are HTTP/2 or not
// and however slow the ends are; meanwhile the memory does not grow with them.
func TestBytesPassUnchanged(t *testing.T) {
	const size = 64 << 20
	for name, begin := range map[string]string{"not HTTP/2": "", "HTTP/2 that is broken": http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"} {
		t.Run(name, func(t *testing.T) {
			client, driver, _ := pipe(t)
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			var ends sync.WaitGroup
			sums := make([][]byte, 4)
			send := func(i int, c *net.UnixConn) {
				r := rand.NewChaCha8([32]byte{byte(i)})
				h := sha256.New()
				w := io.MultiWriter(slowly{c, rand.New(rand.NewPCG(1, uint64(i)))}, h)
				if _, err := io.Copy(w, io.MultiReader(bytes.NewBufferString(begin), io.LimitReader(r, size))); err != nil {
					t.Error(err)
				}
				c.CloseWrite()
				sums[i] = h.Sum(nil)
			}
			receive := func(i int, c *net.UnixConn) {
				h := sha256.New()
				if n, err := io.Copy(h, slowly{c, rand.New(rand.NewPCG(2, uint64(i)))}); err != nil || n != size+int64(len(begin)) {
					t.Errorf("%d bytes: %v", n, err)
				}
				sums[i] = h.Sum(nil)
			}
			ends.Go(func() { send(0, client) })
			ends.Go(func() { receive(1, driver) })
			ends.Go(func() { send(2, driver) })
			ends.Go(func() { receive(3, client) })
			ends.Wait()
			if !bytes.Equal(sums[0], sums[1]) || !bytes.Equal(sums[2], sums[3]) {
				t.Error("other bytes arrived than were sent")
			}
			runtime.ReadMemStats(&after)
			if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 64<<20 {
				t.Errorf("the heap grew by %d bytes", grown)
			}
		})
	}
}

func TestAHalfCloseIsPassedOn(t *testing.T) {
	client, driver := limited(t)
	if _, err := client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	client.CloseWrite()
	if got, err := io.ReadAll(driver); err != nil || string(got) != "question" {
		t.Fatalf("%q %v", got, err)
	}
	if _, err := driver.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	driver.Close()
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Fatalf("%q %v", got, err)
	}
}

// Data that the driver sent before it closed still arrives, and a write to it fails in the end.
func TestADriverThatLeavesIsSeen(t *testing.T) {
	client, driver := limited(t)
	if _, err := driver.Write([]byte("goodbye")); err != nil {
		t.Fatal(err)
	}
	driver.Close()
	got := make([]byte, 7)
	if _, err := io.ReadFull(client, got); err != nil || string(got) != "goodbye" {
		t.Fatalf("%q %v", got, err)
	}
	for {
		if _, err := client.Write(make([]byte, 1<<10)); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the client can write for ever")
			}
			return
		}
	}
}

// A driver that reads no more, and still answers: writes to it fail, and the answer arrives.
func TestADriverThatReadsNoMoreIsSeen(t *testing.T) {
	client, driver := limited(t)
	if err := driver.CloseRead(); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := client.Write(make([]byte, 1<<10)); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the client can write for ever")
			}
			break
		}
	}
	if _, err := driver.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	driver.Close()
	if got, err := io.ReadAll(client); err != nil || string(got) != "answer" {
		t.Errorf("%q %v", got, err)
	}
}

func TestAClientThatLeavesIsSeen(t *testing.T) {
	client, driver := limited(t)
	client.Close()
	if n, err := driver.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%d %v", n, err)
	}
}

func TestAClientOfNoDriverSeesAClosedConnection(t *testing.T) {
	p := startProxy(t, filepath.Join(socketDir(t), "none"), nil)
	c, err := net.Dial("unix", p.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes", n)
	}
	p.stop()
	if text := p.rec.Summary(); !strings.Contains(text, "the driver could not be reached by 1 connection") {
		t.Error(text)
	}
}

// At the end a running call is answered, and a client that only keeps its connection does
// not hold up the end.
func TestRunningCallsAreAnsweredAfterTheEnd(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	reached, release := make(chan struct{}), make(chan struct{})
	serveCSI(t, path, func(ctx context.Context, method string, _ proto.Message) (proto.Message, error) {
		if method == "NodePublishVolume" {
			close(reached)
			<-release
			return &csi.NodePublishVolumeResponse{}, nil
		}
		return &csi.ProbeResponse{}, nil
	})
	p := startProxy(t, path, nil)
	idle, busy := connect(t, p.path), connect(t, p.path)
	if _, err := invoke(t, t.Context(), idle, "Probe", &csi.ProbeRequest{}); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := invoke(t, t.Context(), busy, "NodePublishVolume", &csi.NodePublishVolumeRequest{VolumeId: "v"})
		answered <- err
	}()
	<-reached
	p.cancel()
	select {
	case <-p.ended:
		t.Fatal("it ended with a call that runs")
	case <-time.After(3 * idleAtEnd):
	}
	close(release)
	if err := <-answered; err != nil {
		t.Error(err)
	}
	select {
	case <-p.ended:
	case <-time.After(waitLimit):
		t.Fatal("it does not end")
	}
	calls := p.wait(2)
	if last := calls[len(calls)-1]; last.Code != "OK" || last.Name() != "NodePublishVolume" {
		t.Errorf("%+v", last)
	}
}

// When the time for that is over, the call is cut off, and the record says so.
func TestACutEndsCalls(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	reached := make(chan struct{})
	serveCSI(t, path, func(ctx context.Context, _ string, _ proto.Message) (proto.Message, error) {
		close(reached)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	p := startProxy(t, path, nil)
	answered := make(chan error, 1)
	go func() {
		_, err := invoke(t, t.Context(), connect(t, p.path), "NodePublishVolume", &csi.NodePublishVolumeRequest{VolumeId: "v"})
		answered <- err
	}()
	<-reached
	p.stop()
	if err := <-answered; status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
	if c := p.wait(1)[0]; c.End != Disconnected || c.Code != "" || c.Volume != "v" {
		t.Errorf("%+v", c)
	}
}
