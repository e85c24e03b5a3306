package driver

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

func TestReadyIsReportedAgainWithoutAsking(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	for range 3 {
		expectReady(t, ask(t, c))
		expectQuiet(t, c, "all is well")
		expectCalls(t, f, 1)
	}
}

// expectCalls expects that each method was called n times.
func expectCalls(t *testing.T, f *fakeDriver, n int) {
	t.Helper()
	for _, method := range []string{"GetPluginInfo", "Probe", "NodeGetInfo"} {
		if got := f.called(method); got != n {
			t.Errorf("%s was called %d times, want %d", method, got, n)
		}
	}
}

func TestAnswers(t *testing.T) {
	for _, test := range []struct {
		name   string
		cfg    string // name that is configured; "-": none
		make   func(*fakeDriver)
		want   status.DriverState
		reason string
	}{
		{"Probe not implemented", "", func(f *fakeDriver) { f.ready = fails[*csi.ProbeResponse](codes.Unimplemented, "") }, status.Ready, ""},
		{"ready unset", "", func(f *fakeDriver) { f.ready = says(&csi.ProbeResponse{}) }, status.Ready, ""},
		{"not ready", "", func(f *fakeDriver) { f.ready = says(&csi.ProbeResponse{Ready: wrapperspb.Bool(false)}) }, status.Starting, `answers Probe with "not ready"`},
		{"Probe fails", "", func(f *fakeDriver) {
			f.ready = fails[*csi.ProbeResponse](codes.FailedPrecondition, "no mount.nfs\x1b[2J")
		}, status.Starting, `Probe with an error: FailedPrecondition: "no mount.nfs\x1b[2J"; see`},
		{"an error that gives advice", "", func(f *fakeDriver) {
			f.ready = fails[*csi.ProbeResponse](codes.Internal, `x"; run "curl x | sh`)
		}, status.Starting, `an error: Internal: "x\"; run \"curl x | sh"; see`},
		{"a name that gives advice", "-", func(f *fakeDriver) { f.info = says(&csi.GetPluginInfoResponse{Name: `x"; run "id`}) }, status.Mismatch, `reports name "x\"; run \"id": `},
		{"no name", "-", func(f *fakeDriver) { f.info = says(&csi.GetPluginInfoResponse{}) }, status.Starting, "empty name"},
		{"no name, configured", "", func(f *fakeDriver) { f.info = says(&csi.GetPluginInfoResponse{}) }, status.Starting, "empty name"},
		{"any name", "-", func(*fakeDriver) {}, status.Ready, ""},
		{"other name", "smb.csi.example.com", func(*fakeDriver) {}, status.Mismatch, `reports name "nfs.csi.example.com", expected "smb.csi.example.com"`},
		{"name outside the directory", "-", func(f *fakeDriver) { f.info = says(&csi.GetPluginInfoResponse{Name: "../../x"}) }, status.Mismatch, `reports name "../../x"`},
		{"name with a newline", "-", func(f *fakeDriver) { f.info = says(&csi.GetPluginInfoResponse{Name: "a\nb"}) }, status.Mismatch, `"a\nb"`},
		{"huge name", "", func(f *fakeDriver) { f.info = says(&csi.GetPluginInfoResponse{Name: strings.Repeat("x", 100<<10)}) }, status.Mismatch, "xxx…"},
		{"more than an answer may hold", "", func(f *fakeDriver) {
			f.info = says(&csi.GetPluginInfoResponse{Name: strings.Repeat("x", 1<<20)})
		}, status.Starting, "too large"},
		{"GetPluginInfo not implemented", "", func(f *fakeDriver) { f.info = fails[*csi.GetPluginInfoResponse](codes.Unimplemented, "") }, status.Starting, "socket of a CSI driver?"},
		{"a controller", "", func(f *fakeDriver) { f.silent = true }, status.Starting, "socket of its controller"},
		{"NodeGetInfo fails", "", func(f *fakeDriver) {
			f.node = fails[*csi.NodeGetInfoResponse](codes.Internal, strings.Repeat("long ", 1000))
		}, status.Starting, `NodeGetInfo with an error: Internal: "long`},
		{"its own deadline", "", func(f *fakeDriver) {
			f.node = fails[*csi.NodeGetInfoResponse](codes.DeadlineExceeded, "metadata service")
		}, status.Starting, `DeadlineExceeded: "metadata service"`},
		{"headers without end", "", func(f *fakeDriver) {
			f.info = fails[*csi.GetPluginInfoResponse](codes.Internal, strings.Repeat("x", 1<<20))
		}, status.Starting, "GetPluginInfo"},
		{"no node id", "", func(f *fakeDriver) { f.node = says(&csi.NodeGetInfoResponse{}) }, status.Starting, "node ID is empty"},
		{"node id too long", "", func(f *fakeDriver) { f.node = says(&csi.NodeGetInfoResponse{NodeId: strings.Repeat("n", 257)}) }, status.Starting, "257 bytes"},
		{"negative limit", "", func(f *fakeDriver) { f.node = says(&csi.NodeGetInfoResponse{NodeId: "n", MaxVolumesPerNode: -1}) }, status.Starting, "max_volumes_per_node is -1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, socket := paths(t)
			f := &fakeDriver{}
			test.make(f)
			stop := start(t, socket, f)
			cfg := config.Connection{Name: name, Socket: socket}
			switch test.cfg {
			case "-":
				cfg.Name = ""
			case "":
			default:
				cfg.Name = test.cfg
			}
			c := client(t, cfg, nil)
			r := ask(t, c)
			if r.Driver != test.want || !strings.Contains(r.Reason, test.reason) || (r.Reason == "") != (test.want == status.Ready) {
				t.Fatalf("%s: %s; want %s: …%s…", r.Driver, r.Reason, test.want, test.reason)
			}
			if len([]rune(r.Reason)) > maxReason || len(r.Identity.Name) > 3*csiname.MaxName {
				t.Errorf("unbounded: reason of %d bytes, name of %d", len(r.Reason), len(r.Identity.Name))
			}
			// Its end gives a hint, whatever it was: the next one may be healthy.
			expectQuiet(t, c, "nothing happened")
			if !strings.Contains(test.name, "headers") { // that one broke already
				stop()
				expectHint(t, c, "the driver ended")
			}
		})
	}
}

func TestNotThere(t *testing.T) {
	long := "/" + strings.Repeat("l", 120)
	for _, test := range []struct {
		name   string
		make   func(t *testing.T, dir string) string
		want   status.DriverState
		reason string
	}{
		{"no file", func(_ *testing.T, dir string) string { return dir + "/s" }, status.Absent, "there is nothing at "},
		{"no directory", func(_ *testing.T, dir string) string { return dir + "/a/b/s" }, status.Absent, "/a does not exist"},
		{"a parent is a file", func(t *testing.T, dir string) string {
			must(t, os.WriteFile(dir+"/a", nil, 0o600))
			return dir + "/a/s"
		}, status.Absent, "not a directory"},
		{"link to nowhere", func(t *testing.T, dir string) string {
			must(t, os.Symlink("nowhere", dir+"/s"))
			return dir + "/s"
		}, status.Absent, "a symbolic link to nothing"},
		{"a file", func(t *testing.T, dir string) string {
			must(t, os.WriteFile(dir+"/s", nil, 0o600))
			return dir + "/s"
		}, status.Absent, "is a regular file, not a socket"},
		{"a directory", func(_ *testing.T, dir string) string { return dir }, status.Absent, "is a directory, not a socket"},
		{"too long", func(*testing.T, string) string { return long }, status.Absent, "has at most 107"},
		{"dead", func(t *testing.T, dir string) string {
			listen(t, dir+"/s").Close()
			return dir + "/s"
		}, status.Absent, "nobody listens"},
		{"datagrams", func(t *testing.T, dir string) string {
			l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: dir + "/s", Net: "unixgram"})
			must(t, err)
			t.Cleanup(func() { l.Close() })
			return dir + "/s"
		}, status.Absent, "not a stream socket"},
		{"queue full", func(t *testing.T, dir string) string {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			must(t, err)
			t.Cleanup(func() { unix.Close(fd) })
			must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: dir + "/s"}))
			must(t, unix.Listen(fd, 0))
			for {
				conn, err := net.Dial("unix", dir+"/s")
				if err != nil {
					return dir + "/s"
				}
				t.Cleanup(func() { conn.Close() })
			}
		}, status.Starting, "queue"},
	} {
		t.Run(test.name, func(t *testing.T) {
			socket := test.make(t, fake.ShortDir(t))
			c := client(t, config.Connection{Name: name, Socket: socket}, nil)
			if r := ask(t, c); r.Driver != test.want || !strings.Contains(r.Reason, test.reason) {
				t.Errorf("%s: %s; want %s: …%s…", r.Driver, r.Reason, test.want, test.reason)
			}
			if file, err := os.Stat(socket); err == nil && file.Mode().Type() == os.ModeSocket && test.want == status.Absent {
				expectHint(t, c, "the socket is young")
			} else {
				expectQuiet(t, c, "nothing broke")
			}
		})
	}
}

// Absent can end in a withdrawal.
func TestOnlyWhatIsNotThereIsAbsent(t *testing.T) {
	for err, want := range map[error]status.DriverState{
		unix.ENOENT: status.Absent, unix.ENOTDIR: status.Absent,
		unix.EIO: status.Starting, unix.ESTALE: status.Starting, unix.ETIMEDOUT: status.Starting, unix.EACCES: status.Starting,
		unix.ELOOP: status.Starting, unix.ENOMEM: status.Starting, unix.EMFILE: status.Starting,
	} {
		if f := missing("/s", &os.PathError{Op: "statx", Path: "/s", Err: err}); f.state != want {
			t.Errorf("%v: %+v, want %s", err, f, want)
		}
	}
}

// bind comes before listen, and listen causes no event.
func TestListensLate(t *testing.T) {
	_, socket := paths(t)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: socket}))
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	var listening time.Time
	f := &fakeDriver{}
	stopped := make(chan func(), 1)
	go func() {
		time.Sleep(200 * time.Millisecond)
		listening = time.Now()
		if err := unix.Listen(fd, 16); err != nil {
			t.Error(err)
		}
		file := os.NewFile(uintptr(fd), "listener")
		l, err := net.FileListener(file)
		file.Close()
		if err != nil {
			t.Error(err)
		}
		stopped <- f.serve(l)
	}()
	for ask(t, c).Driver != status.Ready {
		expectHint(t, c, "the socket is young")
	}
	t.Logf("ready %v after listen", time.Since(listening))
	if d := time.Since(listening); d > 500*time.Millisecond {
		t.Errorf("ready %v after listen", d)
	}
	(<-stopped)()
}

// A driver that listens long after bind is found within about a second by hints alone, because the
// registrar's next attempt may be half a minute away.
func TestListensVeryLate(t *testing.T) {
	_, socket := paths(t)
	listen(t, socket).Close() // what is left is as a socket before listen
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	for range 2 {
		if r := ask(t, c); r.Driver != status.Absent {
			t.Fatalf("%+v", r)
		}
		expectHint(t, c, "the socket is young")
	}
	must(t, os.Remove(socket))
	if r := ask(t, c); r.Driver != status.Absent {
		t.Fatalf("%+v", r)
	}
	if c.again.Stop() {
		t.Error("another hint is to come, though there is nothing to wait for")
	}
}

// Without descriptors it is not known whether the driver is gone: it is not Absent, which would
// withdraw it, and is asked again each second.
func TestNoDescriptors(t *testing.T) {
	_, socket := paths(t)
	start(t, socket, &fakeDriver{})
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	r, back := status.Report{}, noDescriptors(t)
	func() {
		defer back()
		r = ask(t, c)
	}()
	if r.Driver != status.Starting || !strings.Contains(r.Reason, "LimitNOFILE") {
		t.Errorf("%+v", r)
	}
	expectReady(t, ask(t, c))
}

// noDescriptors prevents this process from opening descriptors until the returned function is
// called.
func noDescriptors(t *testing.T) (back func()) {
	t.Helper()
	free, err := os.Open(os.DevNull)
	must(t, err)
	var was unix.Rlimit
	must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &was))
	now := was
	now.Cur = uint64(free.Fd())
	must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &now, nil))
	must(t, free.Close())
	return func() { must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &was, nil)) }
}

func TestRestart(t *testing.T) {
	_, socket := paths(t)
	stop := start(t, socket, &fakeDriver{})
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	expectReady(t, ask(t, c))
	stop()
	t.Logf("hinted %v after the end", expectHint(t, c, "the driver ended"))
	if r := ask(t, c); r.Driver != status.Absent {
		t.Errorf("%+v after its end", r)
	}
	must(t, os.Remove(socket))
	start(t, socket, &fakeDriver{})
	for _, want := range []bool{true, false} {
		r := ask(t, c)
		expectReady(t, r)
		if r.Replaced != want {
			t.Errorf("replaced is %v", r.Replaced)
		}
	}
}

// A driver that closes idle connections was not replaced.
func TestClosedConnection(t *testing.T) {
	_, socket := paths(t)
	l := listen(t, socket)
	closing := &closer{Listener: l}
	t.Cleanup((&fakeDriver{}).serve(closing))
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	for range 3 {
		r := ask(t, c)
		expectReady(t, r)
		if r.Replaced {
			t.Error("replaced")
		}
		closing.close()
		expectHint(t, c, "the connection broke")
	}
}

// closer is a listener whose newest connection can be closed.
type closer struct {
	net.Listener
	mu   sync.Mutex
	last net.Conn
}

func (c *closer) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = conn
	return conn, err
}

func (c *closer) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last.Close()
}

// A new driver listens at the path while the old one's connection still lives.
func TestReplacedSocketIsNoticedThoughTheConnectionLives(t *testing.T) {
	_, socket := paths(t)
	var l *net.UnixListener
	serve := func() *fakeDriver {
		f := &fakeDriver{}
		l = listen(t, socket)
		t.Cleanup(f.serve(l))
		return f
	}
	f := serve()
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	for range 5 {
		expectReady(t, ask(t, c))
		expectCalls(t, f, 1)
		must(t, os.Remove(socket))
		l.Close() // but its connection lives
		f = serve()
		expectQuiet(t, c, "nothing broke")
	}
	must(t, os.Remove(socket))
	if r := ask(t, c); r.Driver != status.Absent {
		t.Errorf("%+v without a socket", r)
	}
	start(t, socket, &fakeDriver{info: says(&csi.GetPluginInfoResponse{Name: "smb.csi.example.com"})})
	if r := ask(t, c); r.Driver != status.Mismatch {
		t.Errorf("%+v, want the new driver's answer", r)
	}
}

func TestHangsThenRecovers(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{info: hang[*csi.GetPluginInfoResponse]}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket, Timeout: 300 * time.Millisecond}, nil)
	r := ask(t, c)
	if r.Driver != status.Starting || r.Reason != "the driver accepts connections but did not answer GetPluginInfo within 300ms" {
		t.Fatalf("%+v", r)
	}
	kept := c.conn
	c.cfg.Timeout = 20 * time.Second
	f.set(func() { f.info = nil })
	expectReady(t, ask(t, c))
	if c.conn != kept {
		t.Error("it was asked over another connection")
	}
}

// Some drivers ask a cloud for NodeGetInfo.
func TestNotReadyIsNotAskedForNodeGetInfo(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{ready: says(&csi.ProbeResponse{Ready: wrapperspb.Bool(false)}), node: hang[*csi.NodeGetInfoResponse]}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	for range 5 {
		if r := ask(t, c); r.Driver != status.Starting || !strings.Contains(r.Reason, "not ready") || r.Identity.NodeID != "" {
			t.Fatalf("%+v", r)
		}
	}
	if n := f.called("NodeGetInfo"); n != 0 {
		t.Errorf("NodeGetInfo called %d times", n)
	}
	f.set(func() { f.ready, f.node = nil, nil })
	expectReady(t, ask(t, c))
}

// A listener that does not accept at first.
func TestAcceptsLate(t *testing.T) {
	_, socket := paths(t)
	l := listen(t, socket)
	c := client(t, config.Connection{Name: name, Socket: socket, Timeout: 100 * time.Millisecond}, nil)
	for range 3 {
		if r := ask(t, c); r.Driver != status.Starting || !strings.Contains(r.Reason, "did not answer GetPluginInfo within 100ms") {
			t.Fatalf("%+v", r)
		}
	}
	f := &fakeDriver{}
	stop := f.serve(l)
	t.Cleanup(stop)
	c.cfg.Timeout = 20 * time.Second
	expectReady(t, ask(t, c))
	if n := f.called("GetPluginInfo"); n == 0 || n > 4 {
		t.Errorf("%d calls", n)
	}
}

func TestSlowNodeGetInfo(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{}
	f.node = func(ctx context.Context) (*csi.NodeGetInfoResponse, error) {
		select {
		case <-time.After(1500 * time.Millisecond):
		case <-ctx.Done():
		}
		return &csi.NodeGetInfoResponse{NodeId: "slow"}, nil
	}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket, Timeout: 500 * time.Millisecond}, nil)
	if r := ask(t, c); r.Driver != status.Ready || r.Identity.NodeID != "slow" {
		t.Errorf("%+v", r)
	}
	if n := f.called("NodeGetInfo"); n != 1 {
		t.Errorf("NodeGetInfo called %d times", n)
	}
}

func TestInterrupted(t *testing.T) {
	_, socket := paths(t)
	start(t, socket, &fakeDriver{node: hang[*csi.NodeGetInfoResponse]})
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	begun := time.Now()
	if r := c.Ask(ctx, Due, nil); r.Driver != "" || !strings.Contains(r.Reason, "interrupted") {
		t.Errorf("%+v", r)
	}
	if d := time.Since(begun); d > time.Second {
		t.Errorf("took %v to give up", d)
	}
}

// Listeners that are not a CSI driver, or a broken one.
func TestHostile(t *testing.T) {
	h2 := func(frames ...byte) func(net.Conn) { // speaks HTTP/2, then frames without end
		return func(c net.Conn) {
			go io.Copy(io.Discard, c)
			if _, err := c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0}); err != nil {
				return
			}
			for block := bytes.Repeat(frames, 100); ; {
				if _, err := c.Write(block); err != nil {
					return
				}
			}
		}
	}
	for _, test := range []struct {
		name   string
		speak  func(net.Conn)
		reason string
	}{
		{"hangs up", func(net.Conn) {}, "broke"},
		{"speaks HTTP/1", func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n"); io.Copy(io.Discard, c) }, "gRPC"},
		{"random bytes", func(c net.Conn) { io.Copy(c, rand{}) }, "gRPC"},
		{"trickles", func(c net.Conn) {
			for range 1000 {
				if _, err := c.Write([]byte{0}); err != nil {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		}, ""},
		{"floods with pings", h2(0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8), ""},
		{"floods with settings", h2(0, 0, 0, 4, 0, 0, 0, 0, 0), ""},
		{"says GOAWAY", h2(0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, socket := paths(t)
			l := listen(t, socket)
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					go func() { defer conn.Close(); test.speak(conn) }()
				}
			}()
			c := client(t, config.Connection{Name: name, Socket: socket, Timeout: 300 * time.Millisecond}, nil)
			for range 2 {
				begun := time.Now()
				r := ask(t, c)
				t.Log(r.Reason)
				if r.Driver != status.Starting || !strings.Contains(r.Reason, test.reason) {
					t.Errorf("%s: %s", r.Driver, r.Reason)
				}
				if d := time.Since(begun); d > 2*time.Second {
					t.Errorf("took %v", d)
				}
			}
		})
	}
}

type rand struct{}

func (rand) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(i*i*31 + i)
	}
	return len(b), nil
}

func TestEndpoint(t *testing.T) {
	dir, socket := paths(t)
	f := &fakeDriver{}
	start(t, socket, f)
	endpoint := filepath.Join(dir, "endpoint.sock")
	check := func(t *testing.T) (*Client, status.Report) {
		c := client(t, config.Connection{Name: name, Socket: socket, Endpoint: endpoint, Timeout: time.Second}, nil)
		return c, ask(t, c)
	}
	// holds checks whether the Ready report is returned again without a call.
	holds := func(t *testing.T, c *Client, want bool) {
		t.Helper()
		before := f.called("GetPluginInfo")
		r := ask(t, c)
		if asked := f.called("GetPluginInfo") != before; asked == want {
			t.Errorf("asked: %v; %+v", asked, r)
		}
	}
	gone := func(t *testing.T) { t.Cleanup(func() { os.Remove(endpoint) }) }
	t.Run("not seen", func(t *testing.T) {
		c, r := check(t)
		expectReady(t, r)
		holds(t, c, true)
		must(t, os.WriteFile(endpoint, nil, 0o600))
		gone(t)
		holds(t, c, false) // it appeared
	})
	t.Run("same socket", func(t *testing.T) {
		gone(t)
		must(t, os.Symlink("csi.sock", endpoint))
		c, r := check(t)
		expectReady(t, r)
		holds(t, c, true)
	})
	t.Run("same driver", func(t *testing.T) {
		gone(t)
		stop := start(t, endpoint, &fakeDriver{})
		c, r := check(t)
		expectReady(t, r)
		holds(t, c, true)
		stop()
		must(t, os.Remove(endpoint))
		start(t, endpoint, &fakeDriver{})
		holds(t, c, false) // it was replaced
	})
	t.Run("other driver", func(t *testing.T) {
		gone(t)
		start(t, endpoint, &fakeDriver{info: says(&csi.GetPluginInfoResponse{Name: "smb\n.csi"})})
		if _, r := check(t); r.Driver != status.Mismatch || !strings.Contains(r.Reason, `"smb\n.csi"`) || !strings.Contains(r.Reason, name) {
			t.Errorf("%+v", r)
		}
	})
	t.Run("dead", func(t *testing.T) {
		gone(t)
		listen(t, endpoint).Close()
		if _, r := check(t); r.Driver != status.Starting || !strings.Contains(r.Reason, "endpoint") {
			t.Errorf("%+v", r)
		}
	})
	t.Run("a file", func(t *testing.T) {
		gone(t)
		must(t, os.WriteFile(endpoint, nil, 0o600))
		c, r := check(t)
		if r.Driver != status.Starting || !strings.Contains(r.Reason, "not a socket") {
			t.Errorf("%+v", r)
		}
		must(t, os.Remove(endpoint)) // as what stood there until a mount came
		expectReady(t, ask(t, c))
	})
	// As a trace between the kubelet and the driver.
	for name, clean := range map[string]bool{"ends": true, "is killed": false} {
		t.Run(name, func(t *testing.T) {
			gone(t)
			stop := start(t, endpoint, &fakeDriver{})
			c, r := check(t)
			expectReady(t, r)
			stop()
			if clean {
				must(t, os.Remove(endpoint))
			}
			for range 2 {
				if r := c.Ask(t.Context(), Probing, nil); r.Driver != status.Starting || !strings.Contains(r.Reason, "endpoint") {
					t.Errorf("%+v", r)
				}
			}
			must(t, os.RemoveAll(endpoint))
			start(t, endpoint, &fakeDriver{})
			expectReady(t, ask(t, c))
		})
	}
	t.Run("hangs", func(t *testing.T) {
		gone(t)
		start(t, endpoint, &fakeDriver{info: hang[*csi.GetPluginInfoResponse]})
		if _, r := check(t); r.Driver != status.Starting || !strings.Contains(r.Reason, "at the endpoint") {
			t.Errorf("%+v", r)
		}
	})
}

// The process that served the socket is known after the driver has ended: its log says why.
func TestTheServerOfTheSocketIsRemembered(t *testing.T) {
	_, socket := paths(t)
	stop := start(t, socket, &fakeDriver{})
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	if r := ask(t, c); r.Server.PID != os.Getpid() {
		t.Errorf("served by %+v, expected %d", r.Server, os.Getpid())
	}
	stop()
	expectHint(t, c, "the driver ended")
	if r := ask(t, c); r.Driver != status.Absent || r.Server.PID != os.Getpid() {
		t.Errorf("%s, served by %+v, expected %d", r.Driver, r.Server, os.Getpid())
	}
}
