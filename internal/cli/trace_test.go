package cli

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/tool/trace"
)

// heldDriver starts a driver that does not answer NodeGetInfo before answer is closed.
func heldDriver(t *testing.T) (d *fake.Driver, called, answer chan struct{}) {
	called, answer = make(chan struct{}), make(chan struct{})
	hold := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		if strings.HasSuffix(info.FullMethod, "/NodeGetInfo") {
			close(called)
			<-answer
		}
		return handle(ctx, req)
	}
	d = fake.NewDriver(filepath.Join(fake.ShortDir(t), "s"), fake.Healthy("a.example"), grpc.UnaryInterceptor(hold))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	return d, called, answer
}

// callThrough calls NodeGetInfo at a socket, and sends the result when it is there.
func callThrough(t *testing.T, socket string) (*grpc.ClientConn, <-chan error) {
	cc, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	answered := make(chan error, 1)
	go func() {
		_, err := csi.NewNodeClient(cc).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		cc.Close() // an idle connection would be waited for
		answered <- err
	}()
	return cc, answered
}

// A call that is pending when a trace is ended still gets its answer: the kubelet waits for it for
// up to two minutes.
func TestTraceForwardsPendingCallsAtItsEnd(t *testing.T) {
	t.Parallel() // it mostly waits
	d, called, answer := heldDriver(t)
	ctx, interrupt := context.WithCancel(t.Context())
	s, code := newSession(), make(chan int, 1)
	listen := d.Socket + ".listen"
	go func() { code <- s.run(ctx, "trace", "--listen", listen, "--connect", d.Socket) }()
	s.stdout.await(t, "CALL") // it listens

	_, answered := callThrough(t, listen)
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

// A trace whose reader ends, or whose terminal closes, ends as after Ctrl-C: its pending calls are
// answered, and its socket is removed.
func TestTraceWithoutItsTerminal(t *testing.T) {
	for what, leave := range map[string]func(p *os.Process, stdout io.Closer, call func()){
		"no reader": func(_ *os.Process, stdout io.Closer, call func()) {
			stdout.Close()
			call() // its row cannot be written
		},
		"hangup": func(p *os.Process, _ io.Closer, _ func()) { _ = p.Signal(syscall.SIGHUP) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel() // it mostly waits
			d, called, answer := heldDriver(t)
			listen := d.Socket + ".listen"
			cmd := exec.CommandContext(t.Context(), os.Args[0], "trace", "--listen", listen, "--connect", d.Socket)
			cmd.Env = append(os.Environ(), asProgram+"=yes")
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			// A signal that is caught here is not ignored there, as under nohup.
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP)
			defer signal.Stop(hangups)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil { // it listens
				t.Fatalf("%q: %v", line, err)
			}
			cc, answered := callThrough(t, listen)
			<-called
			leave(cmd.Process, stdout, func() {
				if _, err := csi.NewIdentityClient(cc).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{}); err != nil {
					t.Error(err)
				}
			})
			if line, err := bufio.NewReader(stderr).ReadString('\n'); !strings.Contains(line, "waiting for pending calls") {
				t.Errorf("%q: %v", line, err)
			}
			close(answer)
			if err := <-answered; err != nil {
				t.Errorf("the pending call: %v", err)
			}
			if _, err := io.Copy(io.Discard, stderr); err != nil {
				t.Error(err)
			}
			if _, ok := errors.AsType[*exec.ExitError](cmd.Wait()); ok && cmd.ProcessState.ExitCode() != exitFailed {
				t.Errorf("it ended with %s", cmd.ProcessState)
			}
			if _, err := os.Lstat(listen); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("its socket is still there: %v", err)
			}
		})
	}
}

// Nothing that a driver answers reaches a terminal as it is, with --json neither.
func TestTraceEscapesControlCharacters(t *testing.T) {
	for _, json := range []bool{true, false} {
		s := newSession()
		w := traceWriter{rec: trace.NewRecorder(nil), e: s.env, json: json, table: trace.NewTable(80)}
		if err := w.call(trace.Call{Volume: "v\u009b31m\u202ex\u007f", End: "OK"}); err != nil {
			t.Fatal(err)
		}
		if out := s.stdout.String(); strings.ContainsAny(out, "\u009b\u202e\u007f") || !strings.Contains(out, "31m") {
			t.Errorf("%q", out)
		}
	}
}

// A record that cannot be written ends, and no call of the kubelet fails for it.
func TestTraceForwardsWithoutRoomForItsRecord(t *testing.T) {
	dir := fake.ShortDir(t)
	d := fake.NewDriver(filepath.Join(dir, "s"), fake.Healthy("a.example"))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	s, code := newSession(), make(chan int, 1)
	listen, record := filepath.Join(dir, "l"), filepath.Join(dir, "r")
	go func() {
		code <- s.run(ctx, "trace", "--listen", listen, "--connect", d.Socket, "--output", record)
	}()
	s.stdout.await(t, "CALL") // it listens
	makeFull(t, record)
	cc, err := grpc.NewClient("unix:"+listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	for i := range 3 {
		if _, err := csi.NewNodeClient(cc).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		if i == 0 {
			s.stderr.await(t, "no space left on device")
		}
	}
	cc.Close() // an idle connection would be waited for
	interrupt()
	got, calls := <-code, strings.Count(s.stdout.String(), "NodeGetInfo")
	const want = "cannot write the record: write "
	warned := strings.Count(s.stderr.String(), "warning: "+want)
	if got != exitFailed || calls != 4 || warned != 1 || !strings.Contains(s.stderr.String(), "error: "+want) {
		t.Errorf("exit code %d, %q, %q, want all calls, the summary, a warning and an error", got, s.stdout, s.stderr)
	}
}

// makeFull makes every write to a file that this process has open fail, as on a full disk.
func makeFull(t *testing.T, path string) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if target, _ := os.Readlink(fd); target == path {
			n, err := strconv.Atoi(filepath.Base(fd))
			if err := errors.Join(err, unix.Dup3(int(full.Fd()), n, unix.O_CLOEXEC)); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("%s is not open", path)
}
