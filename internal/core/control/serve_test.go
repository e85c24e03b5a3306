package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// The last change is always reported, even with many changes and a slow reader.
func TestWatchMissesNothing(t *testing.T) {
	fake.CheckLeaks(t)
	b := newDaemon(absentDriver("a.csi.example"))
	path, _ := served(t, b)
	const last = 2000
	changed := make(chan struct{})
	defer func() { <-changed }()
	documents := 0
	for s, err := range NewClient(path).Watch(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if documents++; documents == 1 { // the stream is open: now change things
			go func() {
				defer close(changed)
				for i := range last {
					b.set(func(s *status.Document) { s.Version = fmt.Sprint(i + 1) })
				}
			}()
		}
		if s.Version == fmt.Sprint(last) {
			break
		}
	}
	if documents < 2 || documents > last+1 {
		t.Errorf("%d documents", documents)
	}
}

// The pause after a document depends on the time that it took, not on the time since.
func TestWatchReportsAtOnceAfterAPause(t *testing.T) {
	fake.CheckLeaks(t)
	b := newDaemon()
	path, _ := served(t, b)
	var changed time.Time
	for _, err := range NewClient(path).Watch(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if !changed.IsZero() {
			break
		}
		time.Sleep(300 * time.Millisecond) // nothing changes
		changed = time.Now()
		b.set(func(s *status.Document) { s.Version = "2" })
	}
	if took := time.Since(changed); took > 500*time.Millisecond {
		t.Errorf("it took %s", took)
	}
}

func TestWatchEndsWithTheDaemon(t *testing.T) {
	fake.CheckLeaks(t)
	path, stop := served(t, newDaemon())
	var got []error
	for _, err := range NewClient(path).Watch(t.Context()) {
		got = append(got, err)
		if err == nil {
			began := time.Now()
			stop()
			if took := time.Since(began); took >= endTimeout {
				t.Errorf("it waited %s for the stream", took)
			}
		}
	}
	if len(got) != 2 || !errors.Is(got[1], ErrNotRunning) {
		t.Errorf("%v", got)
	}
}

func TestWatchEndsWithItsContext(t *testing.T) {
	fake.CheckLeaks(t)
	path, _ := served(t, newDaemon())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	for _, err := range NewClient(path).Watch(ctx) {
		if err != nil {
			t.Error(err)
		}
		n++
		cancel()
	}
	if n != 1 {
		t.Errorf("%d documents", n)
	}
}

func TestDaemonErrors(t *testing.T) {
	fake.CheckLeaks(t)
	b := newDaemon(registeredDriver("a.csi.example"))
	path, _ := served(t, b)
	c := NewClient(path)
	for _, force := range []bool{false, true} {
		if notes, err := c.Reload(t.Context(), force); err != nil || !slices.Equal(notes, []string{fmt.Sprintf("force %t", force)}) {
			t.Errorf("%q (%v)", notes, err)
		}
	}
	if err := c.Reregister(t.Context(), "a.csi.example", false); err != nil {
		t.Error(err)
	}
	err := c.Reregister(t.Context(), "b/../%2e", true)
	if v, ok := errors.AsType[*Error](err); !ok || !v.NotFound() || v.Text != "cannot register b/../%2e again: no driver of that name is configured" {
		t.Errorf("an unknown driver: %v", err)
	}
	b.reloadErr = errors.New("a.toml:1: wrong\nb.toml:2: wrong")
	_, err = c.Reload(t.Context(), false)
	v, ok := errors.AsType[*Error](err)
	if !ok || v.Text != b.reloadErr.Error() {
		t.Errorf("reload with errors: %v", v)
	}
}

func TestNotRunning(t *testing.T) {
	fake.CheckLeaks(t)
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	c := NewClient(path)
	if _, err := c.Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("no socket: %v", err)
	}
	staleSocket(t, path)
	if _, err := c.Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("a stale socket: %v", err)
	}
}

func TestDaemonDoesNotAnswer(t *testing.T) {
	fake.CheckLeaks(t)
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c := NewClient(path)
	c.limit = time.Second // a whole answer has twice that: a slow machine must not let both pass
	if _, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "did not answer within 1s") {
		t.Errorf("%v", err)
	}
	c.limit = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Status(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// Other users are refused even if the socket's mode lets them connect.
func TestOnlyRootAndOwnUser(t *testing.T) {
	if unix.Geteuid() != 0 {
		t.Skip("needs root: connects as another user")
	}
	path, _ := served(t, newDaemon())
	if err := errors.Join(unix.Chmod(path, 0o666), unix.Chmod(filepath.Dir(path), 0o755)); err != nil {
		t.Fatal(err)
	}
	answer := make(chan string)
	go func() {
		// Never unlocked: the thread, which now has another uid, ends with the goroutine.
		runtime.LockOSThread()
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534)
		if errno != 0 {
			answer <- errno.Error()
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		if err != nil {
			answer <- err.Error()
			return
		}
		defer unix.Close(fd)
		_, _ = unix.Write(fd, []byte("GET /healthz HTTP/1.0\r\n\r\n"))
		buf := make([]byte, 100)
		n, err := unix.Read(fd, buf)
		answer <- fmt.Sprint(max(n, 0), " ", err)
	}()
	if got := <-answer; got != "0 <nil>" && got != "0 connection reset by peer" {
		t.Errorf("another user got %s", got)
	}
	if _, err := NewClient(path).Status(t.Context()); err != nil {
		t.Errorf("root: %v", err)
	}
}

// If silent connections use all places, they are closed within seconds, and requests that waited
// are answered then.
func TestSilentConnections(t *testing.T) {
	fake.CheckLeaks(t)
	path, _ := served(t, newDaemon())
	for range maxConns + 8 {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	c := NewClient(path)
	c.limit = 3 * headerTimeout
	if _, err := c.Status(t.Context()); err != nil {
		t.Error(err)
	}
}

// Open connections do not prevent the daemon from ending.
func TestStopWithOpenConnections(t *testing.T) {
	fake.CheckLeaks(t)
	path, stop := served(t, newDaemon())
	silent, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	half, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	if _, err := io.WriteString(half, "POST /v1/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx"); err != nil {
		t.Fatal(err)
	}
	if _, err := NewClient(path).Status(t.Context()); err != nil { // both are accepted by now
		t.Fatal(err)
	}
	began := time.Now()
	stop()
	if took := time.Since(began); took > endTimeout+time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestLimitsOfRequests(t *testing.T) {
	fake.CheckLeaks(t)
	path, _ := served(t, newDaemon())
	for name, text := range map[string]string{
		"header": "GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n",
		"noise":  strings.Repeat("\x00\xff\n", 1000),
	} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.WriteString(c, text) }() // ends when the other side closes
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if errors.Is(err, context.DeadlineExceeded) || len(got) > 0 && !strings.Contains(string(got), " 4") {
			t.Errorf("%s: %q %v", name, got, err)
		}
		c.Close()
	}
}

// servedPublic serves on TCP until the test ends.
func servedPublic(t *testing.T, b Backend, address string) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Skip(err) // no IPv6
	}
	serving(t, ln, func(ctx context.Context, ln net.Listener) error {
		return ServePublic(ctx, ln, PublicHandler(b), discard())
	})
	return ln.Addr().String()
}

// Any user of the node can connect. Idle connections that sent nothing, part of a request or a
// whole one do not block others.
func TestIdleConnectionsKeepNobodyOut(t *testing.T) {
	fake.CheckLeaks(t)
	addr := servedPublic(t, newDaemon(), "127.0.0.1:0")
	const n = 1000
	for i := range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		defer c.Close()
		// The server may have closed it.
		_, _ = io.WriteString(c, []string{"", "GET /healthz HTTP/1.1\r\n", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"}[i%3])
	}
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + addr + "/healthz")
	for range 2 { // the machine may be slow, but those connections would be open for longer
		if err != nil {
			resp, err = client.Get("http://" + addr + "/healthz")
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Error(resp.Status)
	}
}

// A web page whose name resolves to the loopback address (DNS rebinding) cannot read the answers.
func TestHostIsChecked(t *testing.T) {
	fake.CheckLeaks(t)
	get := func(addr, host string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+addr+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	hosts := map[string]int{
		"localhost": 200, "localhost:9809": 200, "127.0.0.1": 200, "127.0.0.1:1": 200, "[::1]": 200, "[::1]:9809": 200,
		"rebind.example": 421, "rebind.example:9809": 421, "localhost.example": 421, "127.0.0.1.example": 421, "10.0.0.1": 421, "[fe80::1]:9809": 421,
	}
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			addr := servedPublic(t, newDaemon(), address)
			if code := get(addr, addr); code != 200 {
				t.Errorf("its own address: %d", code)
			}
			for host, want := range hosts {
				if code := get(addr, host); code != want {
					t.Errorf("Host: %s: %d, want %d", host, code, want)
				}
			}
		})
	}
	// A node that is scraped over the network has names that are not known here.
	if code := get(servedPublic(t, newDaemon(), "0.0.0.0:0"), "node1.example:9809"); code != 200 {
		t.Errorf("on all addresses: %d", code)
	}
}

// The control socket may close a connection at any moment.
func TestClosedConnection(t *testing.T) {
	fake.CheckLeaks(t)
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	for range 100 {
		if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) || !strings.Contains(err.Error(), "closed the connection") {
			t.Fatal(err)
		}
	}
	ln.Close()
	<-ended
}

func TestServeFailsWithItsListener(t *testing.T) {
	fake.CheckLeaks(t)
	ln, err := Listen(t.Context(), filepath.Join(fake.ShortDir(t), "control.sock"))
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if err := Serve(t.Context(), ln, newDaemon(), discard()); err == nil {
		t.Error("no error")
	}
}
