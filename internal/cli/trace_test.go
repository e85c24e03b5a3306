package cli

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/test/fake"
)

// A call that is pending when a trace is ended still gets its answer: the kubelet waits for it for
// up to two minutes.
func TestTraceForwardsPendingCallsAtItsEnd(t *testing.T) {
	t.Parallel() // it mostly waits
	dir := fake.ShortDir(t)
	called, answer := make(chan struct{}), make(chan struct{})
	hold := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		close(called)
		<-answer
		return handle(ctx, req)
	}
	d := fake.NewDriver(filepath.Join(dir, "s"), fake.Healthy("a.example"), grpc.UnaryInterceptor(hold))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)

	ctx, interrupt := context.WithCancel(t.Context())
	s, code := newSession(), make(chan int, 1)
	listen := filepath.Join(dir, "l")
	go func() { code <- s.run(ctx, "trace", "--listen", listen, "--connect", d.Socket) }()
	s.stdout.await(t, "CALL") // it listens

	cc, err := grpc.NewClient("unix:"+listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	answered := make(chan error, 1)
	go func() {
		_, err := csi.NewNodeClient(cc).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		cc.Close() // an idle connection would be waited for
		answered <- err
	}()
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
