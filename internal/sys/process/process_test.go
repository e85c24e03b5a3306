package process

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
	for name, open := range map[string]func(*net.UnixConn) (*os.File, error){
		"SO_PEERPIDFD": func(c *net.UnixConn) (*os.File, error) { return Peer(c) },
		"pidfd_open":   openPeerFile,
	} {
		conn, stop := connectInChild(t)
		pidfd, err := open(conn)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		ended := make(chan error, 1)
		go func() { ended <- AwaitEnd(pidfd) }()
		select {
		case err := <-ended:
			t.Fatalf("%s: it runs, but: %v", name, err)
		case <-time.After(20 * time.Millisecond):
		}
		stop()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: the end is not noticed", name)
		}
		if err := pidfd.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func openPeerFile(c *net.UnixConn) (f *os.File, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	if err := errors.Join(raw.Control(func(conn uintptr) { fd, err = openPeer(int(conn)) }), err); err != nil {
		return nil, err
	}
	return Take(fd)
}

func TestCopy(t *testing.T) {
	conn, stop := connectInChild(t)
	pidfd, err := Peer(conn)
	if err != nil {
		t.Fatal(err)
	}
	defer pidfd.Close()
	pidfd.Fd() // makes it blocking, as handing it to a child does
	same, err := Copy(pidfd)
	if err != nil {
		t.Fatal(err)
	}
	defer same.Close()
	if HasEnded(same) {
		t.Error("it runs")
	}
	stop()
	if err := AwaitEnd(same); err != nil || !HasEnded(same) {
		t.Errorf("%v, ended %t", err, HasEnded(same))
	}
	other, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if f, err := Copy(other); err == nil {
		t.Errorf("%s is not a pidfd", f.Name())
	}
}

// Another process may have the pid of a peer that has ended.
func TestPidfdOfAPeerThatHasEnded(t *testing.T) {
	conn, stop := connectInChild(t)
	stop()
	if f, err := openPeerFile(conn); err == nil {
		t.Errorf("%v of a process that has ended", f.Name())
	}
	// The pid of a living process, and a connection that its process has closed.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	if err := unix.Close(fds[1]); err != nil {
		t.Fatal(err)
	}
	if _, err := openPeer(fds[0]); err == nil {
		t.Error("the connection is closed, so the process may be another")
	}
}

func TestAwaitEndOfAClosedPidfd(t *testing.T) {
	conn, _ := connectInChild(t)
	pidfd, err := Peer(conn)
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
