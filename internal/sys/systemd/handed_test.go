package systemd

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"csi-registrar/internal/test/fake"
)

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// TestReceiveByName runs the test binary as a service (see TestMain) that prints the passed
// descriptors by name.
func TestReceiveByName(t *testing.T) {
	dir := fake.ShortDir(t)
	for _, c := range []struct {
		what, set, want string
	}{
		{"for us", "LISTEN_PID=$$ LISTEN_FDS=3 LISTEN_FDNAMES=x:control:x", "x=a control=b x=c"},
		{"for another process", "LISTEN_PID=1 LISTEN_FDS=3 LISTEN_FDNAMES=x:control:x", ""},
		{"no number", "LISTEN_PID=$$ LISTEN_FDS=x", ""},
		{"nothing", "", ""},
	} {
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "export SYSTEMD_TEST_RECEIVE=1 "+c.set+`; exec "$0"`, os.Args[0])
		for _, name := range []string{"a", "b", "c"} {
			path := filepath.Join(dir, name)
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			f, err := listen(t, path).File()
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		}
		out, err := cmd.CombinedOutput()
		if got := strings.ReplaceAll(string(out), dir+"/", ""); got != c.want || err != nil {
			t.Errorf("%s: %q, %v; want %q", c.what, got, err, c.want)
		}
	}
}

// printReceived is the service of TestReceiveByName.
func printReceived() error {
	files := Receive()
	if os.Getenv("LISTEN_FDS") != "" {
		print("the variables are still there")
	}
	var parts []string
	for _, f := range files {
		l, err := Listener(f)
		if err != nil {
			return err
		}
		parts = append(parts, f.Name()+"="+l.Addr().String())
	}
	print(strings.Join(parts, " "))
	return nil
}

func TestListener(t *testing.T) {
	dir := fake.ShortDir(t)
	path := filepath.Join(dir, "s")
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	datagrams, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "d"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer datagrams.Close()
	packets, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, "p"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	unixListener := listen(t, path)
	connection, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	file, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	pipe, end, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	defer end.Close()
	for what, c := range map[string]struct {
		f    interface{ File() (*os.File, error) }
		want string // empty: an error
	}{
		"a Unix listener":   {unixListener, "unix " + path},
		"a TCP listener":    {tcp.(*net.TCPListener), "tcp " + tcp.Addr().String()},
		"a packet socket":   {packets, "unixpacket " + filepath.Join(dir, "p")},
		"a connection":      {connection.(*net.UnixConn), ""},
		"a datagram socket": {datagrams, ""},
		"a directory":       {itself{file}, ""},
		"a pipe":            {itself{pipe}, ""},
	} {
		f, err := c.f.File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		l, err := Listener(f)
		if (err == nil) != (c.want != "") {
			t.Errorf("%s: %v", what, err)
		}
		if err != nil {
			continue
		}
		if got := l.Addr().Network() + " " + l.Addr().String(); got != c.want {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the path belongs to the service manager: %v", err)
	}
}

// itself is a file in the place of a socket.
type itself struct{ file *os.File }

func (f itself) File() (*os.File, error) { return f.file, nil }
