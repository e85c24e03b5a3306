package kubelet

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/unixsock"
)

// preface is what every HTTP/2 client says first (RFC 9113, 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// TestMain lets the test binary stand in for other processes.
func TestMain(m *testing.M) {
	if what := os.Getenv("KUBELET_TEST_CHILD"); what != "" {
		os.Exit(child(what, os.Args[1:]))
	}
	os.Exit(m.Run())
}

func child(what string, args []string) int {
	switch what {
	case "flood":
		return flood(args[0])
	case "publish":
		return publishForEver(args[0])
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

// flood opens 1,000 connections, half of them silent, half saying noise, and again those
// that are closed, until standard input ends.
func flood(path string) int {
	noise := make([]byte, 4096)
	rand.Read(noise)
	open := make([]net.Conn, 1000)
	fill := func() {
		for i := range open {
			if open[i] != nil {
				open[i].SetReadDeadline(time.Now().Add(time.Microsecond))
				if _, err := open[i].Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
					continue // still open
				}
				open[i].Close()
			}
			c, err := net.Dial("unix", path)
			if err != nil {
				continue
			}
			open[i] = c
			if i%2 == 0 {
				c.SetWriteDeadline(time.Now().Add(time.Millisecond))
				c.Write(noise[:1+i*4])
			}
		}
	}
	fill()
	fmt.Println("flooded")
	end := make(chan struct{})
	go func() { io.Copy(io.Discard, os.Stdin); close(end) }()
	for {
		select {
		case <-end:
			return 0
		default:
			fill()
		}
	}
}

func TestFlood(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a", func(o *Options) { o.Log = slog.New(slog.DiscardHandler) })
	mustAnswer(t, s.path, announcement("a").Endpoint)
	before := memory()

	cmd := startChild(t, "flood", s.path)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatalf("%q %v", line, err)
	}
	most := 0
	var took []time.Duration
	for range 20 { // the kubelet registers meanwhile
		begin := time.Now()
		k := dialAsKubelet(t, s.path)
		if _, err := k.getInfo(t); err != nil {
			t.Errorf("during the flood: %v", err)
		}
		k.notify(t, true, "")
		k.cc.Close()
		took = append(took, time.Since(begin))
		most = max(most, memory()-before)
		if n := connectionsOf(s); n > maxConns {
			t.Errorf("%d connections", n)
		}
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	eventually(t, "the connections go", func() bool { return connectionsOf(s) == 0 })
	slices.Sort(took)
	if median := took[len(took)/2]; median > time.Second {
		t.Errorf("the kubelet has 1 s, and half of its registrations took more than %v", median)
	}
	t.Logf("registrations took %v to %v, median %v; memory grew by %d kB, and is %d kB more at the end", took[0], took[len(took)-1], took[len(took)/2], most/1000, (memory()-before)/1000)
	if most > 10_000_000 {
		t.Errorf("memory grew by %d bytes", most)
	}
	if rest := memory() - before; rest > 3_000_000 {
		t.Errorf("memory stays %d bytes higher", rest)
	}
}

// A kubelet that is connected but just waiting for its driver is not thrown out by a flood.
func TestFloodSparesAConnectedKubelet(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	k := dialAsKubelet(t, s.path)
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	first := s.r.conns.list(s)[0]
	for i := range 3 * maxConns {
		c, err := net.Dial("unix", s.path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i%2 == 0 {
			c.Write([]byte(preface)) // half-open: no SETTINGS follow
		}
	}
	eventually(t, "all accepted", func() bool { return connectionsOf(s) == maxConns })
	mustAnswer(t, s.path, announcement("a").Endpoint) // behind all of them
	k.notify(t, true, "")
	if !slices.Contains(s.r.conns.list(s), first) {
		t.Error("the kubelet had to connect again")
	}
}

func TestConnectionsWithoutACompleteCallAreClosed(t *testing.T) {
	w := newWorld(t)
	const first, idle = 300 * time.Millisecond, time.Second
	r := w.open()
	r.server = newServer(first, idle)
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

// A reader that never reads, and asks all the time, is answered in bounded memory.
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

// call is another user that connects and waits for the end.
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

// Who connected just before the socket went is still answered.
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

// A kubelet that is between GetInfo and Notify is told to go elsewhere, which is the next process.
// Its Notify must not fail: the kubelet (v1.36) would deregister the driver.
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
