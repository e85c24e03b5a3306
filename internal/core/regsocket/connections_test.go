package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/sys/unixsock"
)

// preface is what every HTTP/2 client sends first (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// TestMain lets the test binary run as another process.
func TestMain(m *testing.M) {
	if what := os.Getenv("KUBELET_TEST_CHILD"); what != "" {
		os.Exit(child(what, os.Args[1:]))
	}
	os.Exit(m.Run())
}

func child(what string, args []string) int {
	switch what {
	case "publish":
		return publishForEver(args[0])
	case "kubelet":
		return runKubelet(args[0])
	case "call":
		return call(args[0])
	}
	return 2
}

// startChild runs the test binary as another program.
func startChild(t *testing.T, what string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), "KUBELET_TEST_CHILD="+what)
	cmd.Stderr = os.Stderr
	return cmd
}

// Above the limit the oldest connection is closed, and the newest is answered.
func TestTooManyConnections(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	var conns []net.Conn
	for range maxConns + 10 {
		c, err := net.Dial("unix", s.path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	for i, c := range conns[:10] {
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d of %d is not closed: %v", i+1, len(conns), err)
		}
	}
	eventually(t, "the others stay", func() bool { return connectionsOf(s) == maxConns })
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

func TestConnectionsWithoutACompleteCallAreClosed(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w := newWorld(t)
	const first, idle = 300 * time.Millisecond, time.Second
	r := w.open()
	r.server = newServer(first, idle)
	registerapi.RegisterRegistrationServer(r.server, service{})
	s := socket(t, r, "a")
	publish(t, s)
	for name, c := range map[string]struct {
		say string
		in  time.Duration
	}{
		"silent":         {"", first},
		"half a preface": {preface[:10], first},
		"preface only":   {preface, first},
		"noise":          {"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 0},
		"a frame that is begun": {preface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00" +
			"\x00\x40\x00\x00\x00\x00\x00\x00\x01", idle},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("unix", s.path)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			begin := time.Now()
			io.WriteString(conn, c.say)
			conn.SetReadDeadline(begin.Add(time.Minute))
			if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Error(err)
			}
			if d := time.Since(begin); d < c.in*9/10 {
				t.Errorf("closed after %v", d)
			}
		})
	}
	t.Run("after a call", func(t *testing.T) {
		k := dialAsKubelet(t, s.path)
		if _, err := k.getInfo(t); err != nil {
			t.Fatal(err)
		}
		time.Sleep(first * 3 / 2) // longer than a mute one may
		if connectionsOf(s) != 1 {
			t.Error("closed between GetInfo and Notify")
		}
		k.notify(t, true, "")
		eventually(t, "the idle one is closed", func() bool { return connectionsOf(s) == 0 })
	})
}

// A client that sends all the time and never reads costs a limited amount of memory.
func TestSlowReader(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	before := memory()
	c, err := net.Dial("unix", s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	ping := strings.Repeat("\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678", 1000)
	c.SetWriteDeadline(time.Now().Add(2 * time.Second))
	var n int
	for {
		m, err := io.WriteString(c, ping)
		n += m
		if err != nil {
			break
		}
	}
	if grown := memory() - before; grown > 3_000_000 {
		t.Errorf("%d bytes more", grown)
	}
	t.Logf("%d bytes were taken", n)
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

func TestTooLargeAMessage(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	k := dialAsKubelet(t, s.path)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := k.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{Error: strings.Repeat("x", maxMessage+1)}); err == nil {
		t.Error("taken")
	}
	k.notify(t, false, strings.Repeat("x", maxMessage/2))
	if n := len(look(t, s).Notification.Error); n < maxRefusal/2 || n > 4*maxRefusal {
		t.Errorf("%d bytes of the error are kept", n)
	}
}

// call connects as another user and waits until the connection is closed.
func call(path string) int {
	c, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c.SetDeadline(time.Now().Add(5 * time.Second))
	io.WriteString(c, preface)
	if n, err := c.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		fmt.Fprintln(os.Stderr, "was not closed:", n, err)
		return 1
	}
	return 0
}

func TestOnlyRootMayCall(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be another user")
	}
	w := newWorld(t)
	_, s := w.published("a")
	for _, dir := range []string{w.root, w.dir} {
		os.Chmod(dir, 0o755)
	}
	if err := os.Chmod(s.path, 0o666); err != nil { // else it could not even connect
		t.Fatal(err)
	}
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	other := w.root + "/test" // where another user may run it
	if err := os.WriteFile(other, exe, 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		cmd := startChild(t, "call", s.path)
		cmd.Path = other
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
		if out, err := cmd.Output(); err != nil {
			t.Fatalf("%v %s", err, out)
		}
	}
	if n := strings.Count(w.log.String(), "uid=12345"); n != 1 {
		t.Errorf("said %d times:\n%s", n, w.log)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

// A client that connected just before the socket was removed is still answered.
func TestQueueIsAnsweredWhenTheSocketGoes(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	s.r.conns.mu.Lock() // holds up the accept loop
	answers := make(chan error, 2)
	for range 2 { // at least one of them stays in the queue
		c, err := net.Dial("unix", s.path)
		if err != nil {
			t.Fatal(err)
		}
		cc, err := unixsock.NewClient(c, maxMessage)
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		k := &kubelet{cc, registerapi.NewRegistrationClient(cc)}
		go func() { _, err := k.getInfo(t); answers <- err }()
	}
	done := make(chan error, 1)
	go func() { done <- s.Withdraw(t.Context()) }()
	eventually(t, "the path is gone", func() bool { _, err := os.Lstat(s.path); return err != nil })
	time.Sleep(5 * time.Millisecond) // so that the listener is being stopped
	s.r.conns.mu.Unlock()
	if err := errors.Join(<-done, <-answers, <-answers); err != nil {
		t.Error(err)
	}
}

// A kubelet between GetInfo and Notify is told to connect again, and reaches the next process. Its
// Notify must not fail: the kubelet (v1.36) would deregister the driver.
func TestAKubeletThatWaitsForItsDriverGoesToTheNextProcess(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	o := withRun(w)
	o.Store, o.KeepSockets = m, true
	r, err := Open(w.root, o)
	if err != nil {
		t.Fatal(err)
	}
	s := socket(t, r, "a")
	publish(t, s)
	k := dialAsKubelet(t, s.path)
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Close(t.Context()), r.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	next := socket(t, w.open(with(m, true)), "a")
	if err := next.Adopt(t.Context(), m.pass(t, StorePrefix+"a")); err != nil {
		t.Fatal(err)
	}
	k.notify(t, true, "")
	if l := look(t, next); !l.Notification.Registered {
		t.Errorf("%+v", l)
	}
}
