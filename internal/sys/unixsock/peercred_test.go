package unixsock_test

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

func socketPath(t *testing.T) string {
	t.Helper()
	dir := fake.ShortDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "s")
}

func TestBothEnds(t *testing.T) {
	path := socketPath(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	want := unixsock.Cred{PID: os.Getpid(), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	for name, c := range map[string]net.Conn{"connecting": client, "accepting": server} {
		got, err := unixsock.PeerCred(c.(*net.UnixConn))
		if err != nil || got != want {
			t.Errorf("%s end: %v, %v; want %v", name, got, err, want)
		}
	}
}

// The connecting end sees the process that called listen, even before accept.
func TestConnectingEndSeesTheListener(t *testing.T) {
	if os.Getenv("PEERCRED_LISTEN") != "" {
		l, err := net.Listen("unix", os.Getenv("PEERCRED_LISTEN"))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		os.Stdout.WriteString("listening\n")
		os.Stdin.Read(make([]byte, 1)) // until the parent is done
		return
	}
	path := socketPath(t)
	cmd := exec.Command(os.Args[0], "-test.run=^TestConnectingEndSeesTheListener$")
	cmd.Env = append(os.Environ(), "PEERCRED_LISTEN="+path)
	uid, gid := uint32(os.Geteuid()), uint32(os.Getegid())
	if uid == 0 { // another user is the better proof
		uid, gid = 65533, 65532
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid}}
		if err := os.Chown(filepath.Dir(path), int(uid), int(gid)); err != nil {
			t.Fatal(err)
		}
		bin := filepath.Join(filepath.Dir(path), "bin") // the build directory may be root's alone
		if err := os.Link(os.Args[0], bin); err != nil {
			b, err := os.ReadFile(os.Args[0])
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(bin, b, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		cmd.Path, cmd.Dir = bin, filepath.Dir(path)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); cmd.Wait() }()
	line := make([]byte, 64)
	n, err := out.Read(line)
	if err != nil || !strings.HasPrefix(string(line[:n]), "listening") {
		t.Fatalf("child said %q, %v", line[:n], err)
	}
	c, err := net.DialTimeout("unix", path, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got, err := unixsock.PeerCred(c.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	if got.PID != cmd.Process.Pid || got.UID != uid || got.GID != gid {
		t.Errorf("listener is %+v, want pid %d uid %d gid %d", got, cmd.Process.Pid, uid, gid)
	}
}

func TestClosedConnection(t *testing.T) {
	path := socketPath(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := unixsock.PeerCred(c.(*net.UnixConn)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("error %v, want net.ErrClosed", err)
	}
}

func TestNotAUnixSocket(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unixsock.PeerCred(f); err == nil {
		t.Error("no error for a file")
	}
}
