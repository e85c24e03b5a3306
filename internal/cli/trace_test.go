package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/fake"
	"csi-registrar/internal/trace"
)

// traceLeaks is leaks without the goroutine that package os/signal keeps from its first use.
func traceLeaks(t *testing.T) {
	t.Helper()
	_, stop := signal.NotifyContext(t.Context(), syscall.SIGUSR1)
	stop()
	leaks(t)
}

// tracedDriver serves a driver in a directory of its own.
func tracedDriver(t *testing.T) (dir, socket string) {
	t.Helper()
	dir = newRoot(t)
	socket = filepath.Join(dir, "d")
	d := fake.NewDriver(socket, fake.Healthy("a.example"))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	return dir, socket
}

// nodeInfo is a call of a client at a target of gRPC.
func nodeInfo(t *testing.T, target string) {
	t.Helper()
	c, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := csi.NewNodeClient(c).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
}

// traceOf runs trace, makes calls, and interrupts it.
func traceOf(t *testing.T, calls func(), args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	s := newSession()
	ended := make(chan int, 1)
	go func() { ended <- s.run(ctx, append([]string{"trace"}, args...)...) }()
	calls()
	interrupt()
	select {
	case code = <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it does not end")
	}
	// On a slow machine it says that it waits.
	return code, s.stdout.String(), strings.TrimPrefix(s.stderr.String(), "waiting for calls that are still running; another signal cuts them off\n")
}

func TestTrace(t *testing.T) {
	traceLeaks(t)
	dir, socket := tracedDriver(t)
	listen, file := filepath.Join(dir, "t"), filepath.Join(dir, "record")
	code, stdout, stderr := traceOf(t, func() {
		nodeInfo(t, "unix:"+listen)
		if fi, err := os.Stat(listen); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("the socket: %v, %v", fi, err)
		}
	}, "--listen", listen, "--connect", "unix:"+socket, "--output", file)
	lines := strings.Split(stdout, "\n")
	if code != 0 || stderr != "" || len(lines) != 6 ||
		lines[0] != "TIME      CALL                  VOLUME            TRY     TOOK  CODE" ||
		!strings.HasPrefix(lines[1], time.Now().UTC().Format("15:")) && !strings.Contains(lines[1], ":") ||
		!strings.Contains(lines[1], "  NodeGetInfo           -                   1  ") || !strings.HasSuffix(lines[1], "ms  OK") ||
		!strings.HasPrefix(lines[3], "CALL ") || !strings.HasPrefix(lines[4], "NodeGetInfo                        1       0  ") {
		t.Errorf("%d %s\n%s", code, stderr, stdout)
	}
	if _, err := os.Lstat(listen); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
	fi, err := os.Stat(file)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", fi, err)
	}
	b, err := os.ReadFile(file)
	var c trace.Call
	if err != nil || json.Unmarshal(b, &c) != nil || c.Method != "csi.v1.Node/NodeGetInfo" || c.Code != "OK" || !strings.Contains(string(c.Response), `"node_id":"id-of-a.example"`) {
		t.Errorf("%v %s", err, b)
	}

	// A second trace writes over nothing, and leaves nothing.
	code, _, stderr = traceOf(t, func() {}, "--listen", listen, "--connect", socket, "--output", file)
	if again, err := os.ReadFile(file); code != 1 || !strings.Contains(stderr, "file exists") || err != nil || string(again) != string(b) {
		t.Errorf("%d %s %v %s", code, stderr, err, again)
	}
	if _, err := os.Lstat(listen); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestTraceAsJSON(t *testing.T) {
	traceLeaks(t)
	dir, socket := tracedDriver(t)
	listen := filepath.Join(dir, "t")
	code, stdout, stderr := traceOf(t, func() { nodeInfo(t, "unix:"+listen) }, "--listen", listen, "--connect", socket, "--json")
	var c trace.Call
	if code != 0 || strings.Count(stdout, "\n") != 1 || json.Unmarshal([]byte(stdout), &c) != nil || c.End != trace.Answered || !strings.HasPrefix(stderr, "CALL  ") {
		t.Errorf("%d %s\n%s", code, stdout, stderr)
	}
	code, stdout, stderr = traceOf(t, func() { nodeInfo(t, "unix:"+listen) }, "--listen", listen, "--connect", socket, "--json", "--method", "NodePublish*")
	if code != 0 || stdout != "" || stderr != "no calls\n" {
		t.Errorf("%d %s\n%s", code, stdout, stderr)
	}
}

func TestTraceOverTCP(t *testing.T) {
	traceLeaks(t)
	_, socket := tracedDriver(t)
	port, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := port.Addr().String()
	port.Close()
	dir := newRoot(t)
	code, stdout, stderr := traceOf(t, func() {
		nodeInfo(t, "passthrough:"+address)
		code, stdout, stderr := traceOf(t, func() { nodeInfo(t, "unix:"+filepath.Join(dir, "t")) },
			"--listen", filepath.Join(dir, "t"), "--connect", "tcp:"+address)
		if code != 0 || !strings.Contains(stdout, "NodeGetInfo") {
			t.Errorf("%d %s %s", code, stdout, stderr)
		}
	}, "--listen", "tcp:"+address, "--connect", socket)
	if code != 0 || strings.Count(stdout, "NodeGetInfo") != 3 { // two calls and the summary
		t.Errorf("%d %s %s", code, stdout, stderr)
	}
}

func TestTraceEndsAfterItsDuration(t *testing.T) {
	traceLeaks(t)
	dir, socket := tracedDriver(t)
	code, stdout, stderr := try(t, "trace", "--listen", filepath.Join(dir, "t"), "--connect", socket, "--duration", "1ms")
	if code != 0 || !strings.Contains(stdout, "no calls\n") {
		t.Errorf("%d %s %s", code, stdout, stderr)
	}
}

func TestTraceRefusesWhatIsWrong(t *testing.T) {
	dir := newRoot(t)
	there := filepath.Join(dir, "there")
	if err := os.WriteFile(there, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--listen", "/x"}, 2, "a driver's name is needed, or --listen and --connect"},
		{[]string{"--listen", "tcp:0.0.0.0:1", "--connect", "/x"}, 2, `--listen "tcp:0.0.0.0:1": TCP needs a loopback address and a port, as tcp:127.0.0.1:PORT`},
		{[]string{"--listen", "/x", "--connect", "tcp:example.com:1"}, 2, "TCP needs a loopback address"},
		{[]string{"--listen", "x:y", "--connect", "/x"}, 2, "neither a path that begins with / or ., nor tcp:127.0.0.1:PORT"},
		{[]string{"--listen", "/" + strings.Repeat("x", 107), "--connect", "/x"}, 2, "at most 107"},
		{[]string{"--listen", "/x", "--connect", "/x", "--method", "["}, 2, `--method "[" is not a pattern`},
		{[]string{"--listen", "/x", "--connect", "/x", "--duration", "-1s"}, 2, "negative"},
		{[]string{"--listen", "/x", "--connect", "/x", "--show", ""}, 2, "--show needs a key"},
		{[]string{"--listen", there, "--connect", "/x"}, 1, fmt.Sprintf("cannot listen: %s is there already\nhint: another path; or, if nobody listens there, rm %s", there, there)},
		{[]string{"--listen", filepath.Join(dir, "no/t"), "--connect", "/x"}, 1, "cannot listen: "},
	} {
		code, stdout, stderr := try(t, append([]string{"trace"}, c.args...)...)
		if code != c.code || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%q: %d %s%s", c.args, code, stdout, stderr)
		}
	}
}

// A reader that leaves ends the trace.
func TestTraceToAFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	dir, socket := tracedDriver(t)
	s := newSession()
	s.env.stdout = full
	if code := s.run(t.Context(), "trace", "--listen", filepath.Join(dir, "t"), "--connect", socket); code != exitFailed || !strings.Contains(s.stderr.String(), "no space") {
		t.Errorf("%d %s", code, s.stderr)
	}
}
