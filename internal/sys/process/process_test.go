package process

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// connectInChild returns the accepted end of a connection that another process made. The process
// ends when stop is called.
func connectInChild(t *testing.T) (conn *net.UnixConn, stop func()) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "pf") // short, wherever TMPDIR points
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	child := exec.Command(os.Args[0], "-test.run=^TestConnectAndWait$")
	child.Env = append(os.Environ(), "PIDFD_CONNECT="+path)
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	stop = func() {
		_ = child.Process.Kill() // fails once it has ended
		_ = child.Wait()
	}
	t.Cleanup(stop)
	if err := l.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if conn, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, stop
}

// TestConnectAndWait is the process that connectInChild starts.
func TestConnectAndWait(t *testing.T) {
	path := os.Getenv("PIDFD_CONNECT")
	if path == "" {
		t.Skip("only as the child of another test")
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Read(make([]byte, 1)) // until the other end closes, or this process is killed
}

func TestPeerPidfdReportsTheEnd(t *testing.T) {
	conn, stop := connectInChild(t)
	_, pidfd, err := Peer(conn)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- AwaitEnd(pidfd) }()
	select {
	case err := <-ended:
		t.Fatalf("it runs, but: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the end is not noticed")
	}
	if err := pidfd.Close(); err != nil {
		t.Error(err)
	}
}

// Another process may have the pid of a peer that has ended.
func TestPidfdOfAPeerThatHasEnded(t *testing.T) {
	conn, stop := connectInChild(t)
	stop()
	if _, f, err := Peer(conn); err == nil {
		t.Errorf("%v of a process that has ended", f.Name())
	}
	// The pid of a living process, and a connection that its process has closed.
	dir, err := os.MkdirTemp("/tmp", "pf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	if _, f, err := Peer(accepted.(*net.UnixConn)); err == nil {
		t.Errorf("%s: the connection is closed, so the process may be another", f.Name())
	}
}

func TestAwaitEndOfAClosedPidfd(t *testing.T) {
	conn, _ := connectInChild(t)
	_, pidfd, err := Peer(conn)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- AwaitEnd(pidfd) }()
	time.Sleep(5 * time.Millisecond) // either before or while it waits
	if err := pidfd.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("reported as the end of the process")
		}
	case <-time.After(10 * time.Second):
		t.Error("it still waits")
	}
}

func TestOpen(t *testing.T) {
	child := exec.Command("cat") // until its standard input ends
	if _, err := child.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	pidfd, err := Open(child.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer pidfd.Close()
	if HasEnded(pidfd) {
		t.Error("it has not ended")
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := AwaitEnd(pidfd); err != nil {
		t.Error(err)
	}
	_ = child.Wait() // killed
	if _, err := Open(child.Process.Pid); err == nil {
		t.Error("a process that has ended is opened")
	}
}
