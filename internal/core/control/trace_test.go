package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/test/fake"
)

// pointing simulates the endpoint link; back receives the cause when the link points back.
func pointing(d *daemon) (back chan error, process *string) {
	back, process = make(chan error, 1), new(string)
	d.trace = func(ctx context.Context, rec Recorder) error {
		*process = rec.Process
		if err := rec.Listen(ctx, "/chosen"); err != nil {
			back <- err
			return err
		}
		rec.Linked()
		<-ctx.Done()
		back <- context.Cause(ctx)
		return context.Cause(ctx)
	}
	return back, process
}

func TestTrace(t *testing.T) {
	fake.CheckLeaks(t)
	d := newDaemon(registeredDriver("a.csi.example"))
	back, process := pointing(d)
	path, _ := served(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	var listened string
	err := NewClient(path).Trace(ctx, Recorder{
		Driver: "a.csi.example",
		Listen: func(_ context.Context, path string) error { listened = path; return nil },
		Linked: cancel,
		Held:   func() {},
	})
	if err != nil || listened != "/chosen" {
		t.Fatalf("%v, listening at %q", err, listened)
	}
	select {
	case <-back: // before Trace returned
	default:
		t.Error("Trace returned before the link pointed back")
	}
	if want := fmt.Sprintf("process %d (uid %d)", os.Getpid(), os.Getuid()); *process != want {
		t.Errorf("asked by %q, want %q", *process, want)
	}
}

// The lease ends with its recorder, however that ends.
func TestTraceEndsWithTheRecorder(t *testing.T) {
	for _, c := range []struct {
		name  string
		end   func(net.Conn)
		cause string
	}{
		{"killed", func(c net.Conn) { c.Close() }, "the recorder's connection was closed: it was killed, or has crashed"},
		{"frozen", func(net.Conn) {}, "the recorder sent nothing for 1.5s: it is stopped, or hangs"},
		{"interrupted", func(c net.Conn) { fmt.Fprint(c, "0\r\n\r\n") }, "the recorder has ended"},
		{"sends something else", func(c net.Conn) { fmt.Fprint(c, "no chunk\r\n") }, "the recorder's connection failed: invalid byte in chunk length"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fake.CheckLeaks(t)
			d := newDaemon(registeredDriver("a.csi.example"))
			back, _ := pointing(d)
			path, _ := served(t, d)
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprint(conn, "POST /v1/drivers/a.csi.example/trace HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
			lines := bufio.NewScanner(conn)
			for lines.Scan() && !strings.Contains(lines.Text(), "/chosen") {
			}
			fmt.Fprint(conn, "1\r\n.\r\n") // it listens
			for lines.Scan() && !strings.Contains(lines.Text(), "linked") {
			}
			began := time.Now()
			c.end(conn)
			if err := <-back; err == nil || err.Error() != c.cause {
				t.Errorf("the cause is %q, want %q", err, c.cause)
			}
			// A busy machine takes longer to notice.
			if took := time.Since(began); took > 5*leaseSilence {
				t.Errorf("the link pointed back after %s", took)
			}
		})
	}
}

func TestTraceIsRefused(t *testing.T) {
	fake.CheckLeaks(t)
	d := newDaemon(registeredDriver("a.csi.example"))
	d.trace = func(context.Context, Recorder) error { return errors.New("set endpoint_link = true") }
	path, _ := served(t, d)
	err := NewClient(path).Trace(t.Context(), Recorder{Driver: "a.csi.example"})
	if refused, ok := errors.AsType[*Error](err); !ok || refused.Text != "set endpoint_link = true" {
		t.Error(err)
	}
	err = NewClient(path).Trace(t.Context(), Recorder{Driver: "b.csi.example"})
	if refused, ok := errors.AsType[*Error](err); !ok || !refused.NotFound() {
		t.Error(err)
	}
}

func TestTraceRecorderCannotListen(t *testing.T) {
	fake.CheckLeaks(t)
	d := newDaemon(registeredDriver("a.csi.example"))
	back, _ := pointing(d)
	path, _ := served(t, d)
	full := errors.New("no descriptors left")
	err := NewClient(path).Trace(t.Context(), Recorder{
		Driver: "a.csi.example",
		Listen: func(context.Context, string) error { return full },
		Held:   func() {},
		Linked: func() { t.Error("linked") },
	})
	if !errors.Is(err, full) {
		t.Error(err)
	}
	if err := <-back; err == nil {
		t.Error("the daemon continued without a listener")
	}
}

// The client gets ErrNotRunning when the daemon ends.
func TestTraceWithoutTheDaemon(t *testing.T) {
	fake.CheckLeaks(t)
	d := newDaemon(registeredDriver("a.csi.example"))
	back, _ := pointing(d)
	path, stop := served(t, d)
	stopped := make(chan struct{})
	err := NewClient(path).Trace(t.Context(), Recorder{
		Driver: "a.csi.example",
		Listen: func(context.Context, string) error { return nil },
		Held:   func() {},
		Linked: func() { go func() { defer close(stopped); stop() }() },
	})
	<-stopped
	if !errors.Is(err, ErrNotRunning) {
		t.Error(err)
	}
	if err := <-back; err == nil || err.Error() != "the daemon ends" {
		t.Errorf("the cause is %q", err)
	}
}

// A recorder that was stopped does not take the lease for held before it has read that the daemon
// has revoked it: the calls that it missed would not be counted.
func TestNoBeatAfterAStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		go func() { _, _ = io.Copy(io.Discard, r) }()
		held := 0
		sendBeats(t.Context(), w, func() {
			if held++; held == 3 {
				time.Sleep(leaseSilence) // the process is stopped
			}
		})
		if held != 3 {
			t.Errorf("held %d times, want 3", held)
		}
	})
}
