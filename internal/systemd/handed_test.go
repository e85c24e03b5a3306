package systemd

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
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

func pid() string { return strconv.Itoa(os.Getpid()) }

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
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

// TestReceiveByName runs the test binary as a service (see TestMain) that prints what was
// handed over to it, by name.
func TestReceiveByName(t *testing.T) {
	dir := shortDir(t)
	for _, c := range []struct {
		what, set, want string
	}{
		{"for us", "LISTEN_PID=$$ LISTEN_FDS=3 LISTEN_FDNAMES=x:control:x", "control=b x=a,c; rest x,x"},
		{"for another process", "LISTEN_PID=1 LISTEN_FDS=3 LISTEN_FDNAMES=x:control:x", "; rest "},
		{"no number", "LISTEN_PID=$$ LISTEN_FDS=x", "; rest "},
		{"nothing", "", "; rest "},
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
	h := Receive()
	if os.Getenv("LISTEN_FDS") != "" {
		print("the variables are still there")
	}
	var parts []string
	for _, name := range h.Names() {
		var paths []string
		files := h.Take(name)
		for _, f := range files {
			l, err := net.FileListener(f)
			if err != nil {
				return err
			}
			paths = append(paths, l.Addr().String())
		}
		parts = append(parts, name+"="+strings.Join(paths, ","))
		if name == "x" {
			h.files[name] = files
		}
	}
	var rest []string
	for _, f := range h.Rest() {
		rest = append(rest, f.Name())
	}
	if len(h.Names()) != 0 {
		print("Rest left something")
	}
	print(strings.Join(parts, " ") + "; rest " + strings.Join(rest, ","))
	return nil
}
