package driver

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

func TestFrames(t *testing.T) {
	var stream bytes.Buffer
	stream.WriteString(http2.ClientPreface)
	w := http2.NewFramer(&stream, nil)
	must(t, w.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 16}))
	must(t, w.WriteSettingsAck())
	must(t, w.WriteData(1, false, make([]byte, 1000)))
	must(t, w.WritePing(false, [8]byte{1, 2, 3, 4, 5, 6, 7, 8}))
	must(t, w.WriteData(1, true, nil))
	must(t, w.WriteGoAway(0, 0, []byte("bye")))
	want := "[4/0 4/1 0/0 6/0 0/1 7/0]"
	for _, piece := range []int{1, 2, 7, 9, 10, 33, stream.Len()} {
		f := frames{skip: prefaceSize}
		var got []string
		for part := range slices.Chunk(stream.Bytes(), piece) {
			f.feed(part, func(kind, flags byte) {
				got = append(got, fmt.Sprintf("%d/%d", kind, flags))
				if kind == framePing && f.ping != [8]byte{1, 2, 3, 4, 5, 6, 7, 8} {
					t.Errorf("ping %v", f.ping)
				}
			})
		}
		if fmt.Sprint(got) != want || !f.between() {
			t.Errorf("in pieces of %d: %v (between: %v), want %s", piece, got, f.between(), want)
		}
		f.feed([]byte{0}, nil)
		if f.between() {
			t.Error("between, in the midst of a header")
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 4, 0, 0, 0, 0, 0}, 3)
	f.Fuzz(func(t *testing.T, b []byte, piece int) {
		piece = max(1, min(piece, len(b)))
		var whole, parts frames
		a, z := 0, 0
		whole.feed(b, func(kind, flags byte) { a += 1 + int(kind)<<8 + int(flags)<<16 })
		for p := range slices.Chunk(b, piece) {
			parts.feed(p, func(kind, flags byte) { z += 1 + int(kind)<<8 + int(flags)<<16 })
		}
		if a != z || whole != parts {
			t.Fatalf("as one %+v, in pieces %+v", whole, parts)
		}
	})
}

// gRPC servers ping their idle clients, and hang up if nobody answers.
func TestAnswersPingsAtRest(t *testing.T) {
	_, socket := paths(t)
	l := listen(t, socket)
	// grpc-go allows no interval below a second; so it is one.
	s := grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second, Timeout: 200 * time.Millisecond}))
	f := &fake{}
	csi.RegisterIdentityServer(s, f)
	csi.RegisterNodeServer(s, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	defer func() { s.Stop(); <-done }()
	c := client(t, Config{Name: name, Socket: socket}, nil)
	expectReady(t, c.Ask(t.Context()))
	select {
	case <-c.Hints():
		t.Fatal("the server hung up")
	case <-time.After(3500 * time.Millisecond):
	}
	if c.Stale() {
		t.Error("stale")
	}
	go s.GracefulStop()
	expectHint(t, c, "it said goodbye")
}

// raw is a resting link whose other end the test speaks for itself.
func raw(t *testing.T) (*Client, net.Conn) {
	t.Helper()
	_, socket := paths(t)
	l := listen(t, socket)
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := l.Accept(); err == nil {
			accepted <- conn
		}
	}()
	c := client(t, Config{Name: name, Socket: socket}, nil)
	link, v := dial(t.Context(), socket)
	if link == nil {
		t.Fatal(v)
	}
	link.onBreak = c.broke
	link.out = frames{} // no preface was sent
	link.lay(func() {})
	c.rest = link
	c.resting.Go(link.watch)
	peer := <-accepted
	t.Cleanup(func() { peer.Close() })
	return c, peer
}

func TestFramesAtRest(t *testing.T) {
	c, peer := raw(t)
	w := http2.NewFramer(peer, peer)
	must(t, w.WriteData(3, false, make([]byte, 5000)))
	must(t, w.WriteSettings())
	must(t, w.WritePing(true, [8]byte{9}))
	must(t, w.WriteWindowUpdate(0, 1000))
	must(t, w.WritePing(false, [8]byte{1, 2, 3, 4, 5, 6, 7, 8}))
	must(t, peer.SetReadDeadline(time.Now().Add(2*time.Second)))
	first, err := w.ReadFrame()
	must(t, err)
	if f, ok := first.(*http2.SettingsFrame); !ok || !f.IsAck() {
		t.Errorf("answers %v to settings", first)
	}
	second, err := w.ReadFrame()
	must(t, err)
	if f, ok := second.(*http2.PingFrame); !ok || !f.IsAck() || f.Data != [8]byte{1, 2, 3, 4, 5, 6, 7, 8} {
		t.Errorf("answers %v to a ping", second)
	}
	expectQuiet(t, c, "ordinary frames")
	must(t, w.WriteGoAway(0, 0, nil))
	expectHint(t, c, "GOAWAY")
	if _, err := peer.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%v, want the end of the connection", err)
	}
}

func TestFloodAtRest(t *testing.T) {
	c, peer := raw(t)
	block := make([]byte, 1<<10)
	binary.BigEndian.PutUint32(block, uint32(len(block)-frameHeader)<<8)
	var err error
	for range 1000 {
		if _, err = peer.Write(block); err != nil {
			break
		}
	}
	if err == nil {
		t.Error("a megabyte of rubbish was taken")
	}
	expectHint(t, c, "it floods")
}

func TestFloodWhileTalking(t *testing.T) {
	_, socket := paths(t)
	l := listen(t, socket)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		for block := make([]byte, 1<<20); err == nil; {
			_, err = conn.Write(block)
		}
	}()
	link, v := dial(t.Context(), socket)
	if link == nil {
		t.Fatal(v)
	}
	defer link.end()
	got, buf := 0, make([]byte, 64<<10)
	for {
		n, err := link.Read(buf)
		if got += n; err == errFlood {
			break
		}
		if err != nil || got > 2*talkBudget {
			t.Fatalf("%d bytes were taken, then %v", got, err)
		}
	}
}

func TestClosedAtRestTellsNobody(t *testing.T) {
	c, _ := raw(t)
	must(t, c.Close())
	expectQuiet(t, c, "our own end")
}

// The driver's side of the comparison lives in another process.
func TestMain(m *testing.M) {
	if path := os.Getenv("DRIVER_SERVE"); path != "" {
		l, err := net.Listen("unix", path)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		stop := (&fake{}).serve(l)
		fmt.Println("serving")
		os.Stdin.Read(make([]byte, 1))
		stop()
		return
	}
	os.Exit(m.Run())
}

func serveElsewhere(t testing.TB, path string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DRIVER_SERVE="+path)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	if _, err := out.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
}

func memory() int {
	for range 3 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapInuse + m.StackInuse)
}

// What a thousand registered drivers cost, each with its kept connection.
func TestMemoryOfKeptConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	_, socket := paths(t)
	serveElsewhere(t, socket)
	ask := func() *Client {
		c := client(t, Config{Name: name, Socket: socket}, nil)
		expectReady(t, c.Ask(t.Context()))
		return c
	}
	for range 20 { // whatever is made once
		ask()
	}
	const n = 1000
	before, goroutines := memory(), runtime.NumGoroutine()
	for range n {
		ask()
	}
	per := (memory() - before) / n
	t.Logf("%d bytes and %.2f goroutines a kept connection", per, float64(runtime.NumGoroutine()-goroutines)/n)
	if per > 30<<10 {
		t.Errorf("%d bytes a kept connection, want at most 30 kB", per)
	}
	if got := runtime.NumGoroutine() - goroutines; got > n {
		t.Errorf("%d goroutines for %d connections", got, n)
	}
}

func BenchmarkAsk(b *testing.B) {
	_, socket := paths(b)
	serveElsewhere(b, socket)
	c := client(b, Config{Name: name, Socket: socket}, nil)
	b.ReportAllocs()
	for b.Loop() {
		expectReady(b, c.Ask(b.Context()))
	}
}

func BenchmarkStale(b *testing.B) {
	_, socket := paths(b)
	serveElsewhere(b, socket)
	c := client(b, Config{Name: name, Socket: socket}, nil)
	expectReady(b, c.Ask(b.Context()))
	b.ReportAllocs()
	for b.Loop() {
		if c.Stale() {
			b.Fatal("stale")
		}
	}
}
