package regsocket

import (
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

	"csi-registrar/internal/test/fake"
)

// preface is what every HTTP/2 client sends first (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// TestMain lets the test binary run as another process.
func TestMain(m *testing.M) {
	if what := os.Getenv("KUBELET_TEST_CHILD"); what != "" {
		os.Exit(child(what, os.Args[1:]))
	}
	fake.Main(m)
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
	for range 64 + 10 {
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
	eventually(t, "the others stay", func() bool { return connectionsOf(s) == 64 })
	mustAnswer(t, s.path, announcement("a").Endpoint)
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
	if err := s.Close(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	r.Close(t.Context())
	next := socket(t, w.open(with(m, true)), "a")
	if err := next.Adopt(t.Context(), m.pass(t, StorePrefix+"a")); err != nil {
		t.Fatal(err)
	}
	k.notify(t, true, "")
	if l := look(t, next); !l.Notification.Registered {
		t.Errorf("%+v", l)
	}
}
