package e2e

import (
	"crypto/rand"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
)

// flood opens many connections to a socket: half of them send nothing, half random bytes.
func flood(t *testing.T, path string, n int) (done func()) {
	t.Helper()
	var mu sync.Mutex
	var open []net.Conn
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			c, err := net.DialTimeout("unix", path, 5*time.Second)
			if err != nil {
				return // it may also be refused
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			if i%2 == 0 {
				b := make([]byte, 512)
				rand.Read(b)
				// The other side may have closed the connection, or not read from it.
				_ = c.SetWriteDeadline(time.Now().Add(time.Second))
				_, _ = c.Write(b)
			}
		})
	}
	wg.Wait()
	return func() {
		for _, c := range open {
			c.Close()
		}
	}
}

func TestThousandConnections(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Start()
	c := n.StartDaemon()
	path := n.RegSocket(d.Name)
	if _, ok := harness.WhenAccepts(path, soon); !ok {
		t.Fatal("not published")
	}
	// Without the program's pages, which it shares with other processes that run it.
	own := func() float64 { return memory(t, c.PID(), "Pss_Anon:") }
	before := own()
	done := flood(t, path, 1000)
	during := own()
	open, err := harness.Descriptors(c.PID())
	if err != nil {
		t.Fatal(err)
	}
	k := n.StartKubelet() // calls the socket that is being flooded
	k.Registered(0, d.Name, soon)
	for _, e := range k.Events() {
		if e.Error != "" {
			t.Errorf("the kubelet was not served: %v", e)
		}
	}
	c.WaitState(d.Name, "registered", soon)
	t.Logf("memory before %.1f MB, with 1000 connections %.1f MB, %d descriptors", before, during, len(open))
	if during-before > 10 {
		t.Errorf("memory grew by %.1f MB", during-before)
	}
	if len(open) > 64+32 {
		t.Errorf("%d descriptors open, want at most 64 connections and its own", len(open))
	}
	done()
	// Go keeps the pages of a flood for a while, also twice of them. What each connection left
	// would be more: 1 kB is 20 MB here.
	for range 20 {
		flood(t, path, 1000)()
	}
	left := own()
	t.Logf("after 20 more floods %.1f MB", left)
	if left-before > 14 {
		t.Errorf("memory grew by %.1f MB with 20 more floods", left-before)
	}
}

// Silent connections to all registration sockets are closed after 10 s.
func TestSilentConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	n, d, c, _ := registered(t, "a.example")
	conn, err := net.Dial("unix", n.RegSocket(d.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	start := time.Now()
	if err := conn.SetReadDeadline(start.Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4096)
	for err == nil {
		_, err = conn.Read(b) // a server may send something first
	}
	if took := time.Since(start); took > 15*time.Second || os.IsTimeout(err) {
		t.Errorf("closed after %v (%v), want 10s", took, err)
	}
	if !c.Running() {
		t.Error("the daemon ended")
	}
}

// Clients of the control socket use up the descriptors for a while: this is logged once for each
// driver, and the drivers are registered afterwards.
func TestDescriptorsExhausted(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	var drivers []*harness.Driver
	for _, name := range numbered("d%02d.example", 10) {
		drivers = append(drivers, n.AddDriver(name))
	}
	k := n.StartKubelet()
	c := n.StartDaemonVia(exec.Command("/bin/sh", "-c", `ulimit -n 48; exec "$0" "$@"`))
	c.Hush()
	release := flood(t, n.ControlSocket(), 60)
	for _, d := range drivers {
		d.Start()
	}
	harness.Eventually(t, soon, "the log says it", func() string {
		if !strings.Contains(c.Log(), "LimitNOFILE") {
			return "not yet"
		}
		return ""
	})
	harness.Never(t, 4*time.Second, "the daemon", func() string {
		if !c.Running() {
			return c.Log()
		}
		return ""
	})
	release()
	if lines := strings.Count(c.Log(), "level=WARN"); lines > 3*len(drivers) {
		t.Errorf("%d warnings for %d drivers in 4 s", lines, len(drivers))
	}
	for _, d := range drivers {
		k.Registered(0, d.Name, 40*time.Second)
		c.WaitState(d.Name, "registered", soon)
	}
	if k.Count(0, "deregister", "") != 0 {
		t.Error("the kubelet lost a driver")
	}
}

// Without inotify, when its limits are reached, the daemon looks once a second, and names the
// sysctl.
func TestWithoutInotify(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	sh := exec.Command("/bin/sh", "-c", `echo 0 > /proc/sys/user/max_inotify_instances && exec "$0" "$@"`)
	sh.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER, // the namespace has its own limit
		UidMappings: []syscall.SysProcIDMap{{Size: 65536}},
		GidMappings: []syscall.SysProcIDMap{{Size: 65536}},
	}
	c := n.StartDaemonVia(sh)
	// READY does not wait for the first walk.
	harness.Eventually(t, soon, "the log says why it polls", func() string {
		if log := c.Log(); !strings.Contains(log, "inotify") || !strings.Contains(log, "max_") {
			return log
		}
		return ""
	})
	k := n.StartKubelet()
	served := d.Start()
	at, ok := harness.WhenAccepts(n.RegSocket(d.Name), soon)
	if !ok || at.Sub(served) > 5*time.Second {
		t.Errorf("published after %v (%v), want about 1s, or a few on a busy machine", at.Sub(served), ok)
	}
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
	// Created and removed between two looks, neither of which sees it.
	for range 3 {
		if err := os.Remove(n.RegSocket(d.Name)); err != nil {
			t.Fatal(err)
		}
		if _, ok := harness.WhenAccepts(n.RegSocket(d.Name), 5*time.Second); !ok {
			t.Fatalf("not restored within 5s: %+v", c.Driver(d.Name))
		}
	}
	mark := k.Mark()
	k.Registered(mark, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
}

// A user who can create the socket could replace the driver, so its owner and the directories are
// checked.
func TestUntrustedSockets(t *testing.T) {
	t.Parallel()
	const stranger = 65534
	cases := map[string]struct {
		spoil func(socket string) error
		words []string
		fix   func(socket string) error
	}{
		"socket of another user": {
			func(s string) error { return os.Chown(s, stranger, stranger) }, []string{"owner"},
			func(s string) error { return os.Chown(s, 0, 0) },
		},
		"directory of another user": {
			func(s string) error { return os.Chown(filepath.Dir(s), stranger, stranger) }, []string{"own"},
			func(s string) error { return os.Chown(filepath.Dir(s), 0, 0) },
		},
		"directory that anybody may write": {
			func(s string) error { return os.Chmod(filepath.Dir(s), 0o777) }, []string{"writ"},
			func(s string) error { return os.Chmod(filepath.Dir(s), 0o755) },
		},
	}
	for what, tc := range cases {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.DriverAt("a.example", filepath.Join(n.Run, "a", "csi.sock"))
			n.Configure(d.Name, d.Socket)
			d.Start()
			if err := tc.spoil(d.Socket); err != nil {
				t.Fatal(err)
			}
			k := n.StartKubelet()
			c := n.StartDaemon()
			s := c.WaitState(d.Name, "mismatch", soon)
			contains(t, "the reason", s.Reason, tc.words...)
			if got := n.Sockets(); len(got) != 0 {
				t.Errorf("published: %q", got)
			}
			if err := tc.fix(d.Socket); err != nil {
				t.Fatal(err)
			}
			k.Registered(0, d.Name, 40*time.Second)
		})
	}
	t.Run("turned off", func(t *testing.T) {
		t.Parallel()
		n := harness.New(t)
		d := n.AddDriver("a.example", `socket_owner = "any"`)
		d.Start()
		if err := os.Chown(d.Socket, stranger, stranger); err != nil {
			t.Fatal(err)
		}
		k := n.StartKubelet()
		n.StartDaemon()
		k.Registered(0, d.Name, soon)
	})
}
