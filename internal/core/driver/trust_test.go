package driver

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

const stranger = 65533 // a user that nobody has

func TestTrust(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("other users' files need root")
	}
	me := strconv.Itoa(os.Geteuid())
	for _, test := range []struct {
		name  string
		make  func(dir string) error
		owner string // socket_owner
		want  []string
	}{
		{"good", func(string) error { return nil }, "root", nil},
		{"directory writable by others", func(d string) error { return os.Chmod(d+"/a", 0o757) }, "root",
			[]string{"DIR/a may be written by its group or others (mode 0757), so another user could pose as the driver", `"chmod go-w DIR/a"`}},
		{"directory writable by its group", func(d string) error { return os.Chmod(d+"/a", 0o775) }, "root", []string{"DIR/a may be written by its group or others (mode 0775)"}},
		{"sticky directory", func(d string) error { return os.Chmod(d+"/a", 0o777|os.ModeSticky) }, "root", nil},
		{"a stranger's entry of a sticky directory", func(d string) error {
			must(t, os.Chmod(d+"/a", 0o777|os.ModeSticky))
			return os.Chown(d+"/a/b", stranger, 0)
		}, "root", []string{"DIR/a/b belongs to uid 65533, not to root, so another user could pose as the driver"}},
		{"a stranger's directory", func(d string) error { return os.Chown(d+"/a/b", stranger, 0) }, "root",
			[]string{"DIR/a/b belongs to uid 65533, not to root", `"chown -h root DIR/a/b"`, `socket_owner = "65533"`}},
		{"the owner's directory", func(d string) error { return os.Chown(d+"/a/b", stranger, 0) }, "65533", nil},
		{"our own directory", func(d string) error { return nil }, "65533", nil},
		{"a stranger's socket", func(d string) error { return os.Chown(d+"/a/b/s", stranger, 0) }, "root", []string{"DIR/a/b/s belongs to uid 65533, not to root"}},
		{"through a link", func(d string) error {
			must(t, os.Mkdir(d+"/open", 0o700))
			must(t, os.Chmod(d+"/open", 0o777))
			must(t, os.Rename(d+"/a/b", d+"/open/b"))
			return os.Symlink("../open/b", d+"/a/b")
		}, "root", []string{"DIR/open may be written by its group or others (mode 0777"}},
		{"a link in an open directory", func(d string) error {
			must(t, os.Chmod(d+"/a", 0o777))
			must(t, os.Rename(d+"/a/b", d+"/b"))
			return os.Symlink("../b", d+"/a/b")
		}, "root", []string{"DIR/a may be written by its group or others (mode 0777"}},
		{"a stranger's link in a sticky directory", func(d string) error {
			must(t, os.Chmod(d+"/a", 0o777|os.ModeSticky))
			must(t, os.Rename(d+"/a/b", d+"/b"))
			must(t, os.Symlink("../b", d+"/a/b"))
			return os.Lchown(d+"/a/b", stranger, 0)
		}, "root", []string{"DIR/a/b belongs to uid 65533, not to root", `"rm DIR/a/b"`}},
		{"the owner's link within its directories", func(d string) error {
			must(t, os.Chown(d+"/a/b", stranger, 0))
			must(t, os.Rename(d+"/a/b/s", d+"/a/b/real"))
			must(t, os.Symlink("real", d+"/a/b/s"))
			return os.Lchown(d+"/a/b/s", stranger, 0)
		}, "65533", nil},
		{"the owner's link to another's socket", func(d string) error {
			must(t, os.Chown(d+"/a/b", stranger, 0))
			must(t, os.Rename(d+"/a/b/s", d+"/a/other"))
			must(t, os.Symlink("../other", d+"/a/b/s"))
			return os.Lchown(d+"/a/b/s", stranger, 0)
		}, "65533", []string{"DIR/a/b/s is a symbolic link of uid 65533 and points to DIR/a/other"}},
		{"root's link out of the owner's directory", func(d string) error {
			must(t, os.Chown(d+"/a/b", stranger, 0))
			must(t, os.Rename(d+"/a/b/s", d+"/a/s"))
			return os.Symlink("../s", d+"/a/b/s")
		}, "65533", nil},
		{"a loop of links", func(d string) error {
			must(t, os.RemoveAll(d+"/a/b"))
			return os.Symlink("b", d+"/a/b")
		}, "root", []string{"cannot check who owns the driver's socket", "too many levels"}},
		{"nothing there", func(d string) error { return os.RemoveAll(d + "/a/b") }, "root", nil},
		{"no such user", func(string) error { return nil }, "nobody-has-this-name", []string{`no user "nobody-has-this-name"`}},
		{"turned off", func(d string) error { return os.Chmod(d+"/a", 0o777) }, "any", nil},
		{"ourselves by number", func(string) error { return nil }, me, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir, err := filepath.EvalSymlinks(fake.ShortDir(t))
			must(t, err)
			must(t, os.MkdirAll(dir+"/a/b", 0o755))
			path := dir + "/a/b/s"
			listen(t, path)
			must(t, test.make(dir))
			got := untrusted(trust.SocketOwner(test.owner).Path(path)).reason
			if (got == "") != (test.want == nil) {
				t.Fatalf("says %q", got)
			}
			if strings.Contains(test.name, "owner's link") && strings.Contains(got, "rm ") {
				t.Errorf("says %q: that user could have it remove another file", got)
			}
			if strings.Contains(test.name, "link") && strings.Contains(got, "chown") {
				t.Errorf("says %q: chown would follow a link that anybody made", got)
			}
			for _, want := range test.want {
				if want = strings.ReplaceAll(want, "DIR", dir); !strings.Contains(got, want) {
					t.Errorf("says %q, not %q", got, want)
				}
			}
		})
	}
}

func TestTrustInTheListener(t *testing.T) {
	peer := unixsock.Cred{PID: 12, UID: stranger}
	if why := untrusted(trust.SocketOwner("root").Listener("/s", peer)).reason; !strings.Contains(why, "uid 65533") || !strings.Contains(why, `socket_owner = "65533"`) {
		t.Errorf("says %q", why)
	}
	for _, owner := range []string{"any", "65533"} {
		if err := trust.SocketOwner(owner).Listener("/s", peer); err != nil {
			t.Errorf("owner %s: %v", owner, err)
		}
	}
	for _, uid := range []int{0, os.Geteuid()} {
		if err := trust.SocketOwner("65533").Listener("/s", unixsock.Cred{UID: uint32(uid)}); err != nil {
			t.Errorf("uid %d: %v", uid, err)
		}
	}
}

// While the owner cannot be looked up, a registered driver must stay registered; also if there is
// no such user, because the list of users may be incomplete at the moment.
func TestOwnerThatCannotBeLookedUpIsNoMismatch(t *testing.T) {
	f := untrusted(trust.SocketOwner("no-such-user").Path("/"))
	if f.state != status.Starting || !strings.Contains(f.reason, "socket_owner: there is no user") {
		t.Errorf("%+v", f)
	}
}

func TestUntrustedIsNeverAsked(t *testing.T) {
	dir, socket := paths(t)
	f := &fakeDriver{}
	start(t, socket, f)
	must(t, os.Chmod(dir, 0o777))
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	if r := ask(t, c); r.Driver != status.Mismatch || !strings.Contains(r.Reason, "chmod go-w") {
		t.Errorf("%+v", r)
	}
	if f.called("GetPluginInfo") != 0 {
		t.Error("it was asked")
	}
	must(t, os.Chmod(dir, 0o700))
	expectReady(t, ask(t, c))
	must(t, os.Chmod(dir, 0o777)) // any user can replace the socket now
	if r := ask(t, c); r.Driver != status.Mismatch {
		t.Errorf("%+v", r)
	}
}

// A process of an untrusted user listens at a path that root gave to it.
func TestStrangerListens(t *testing.T) {
	if path := os.Getenv("DRIVER_LISTEN"); path != "" {
		l := listen(t, path)
		os.Stdout.WriteString("listening\n")
		os.Stdin.Read(make([]byte, 1)) // until the parent is done
		l.Close()
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("another user's process needs root")
	}
	dir, socket := paths(t)
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Chown(dir, stranger, stranger))
	binary, err := os.ReadFile(os.Args[0])
	must(t, err)
	must(t, os.WriteFile(dir+"/bin", binary, 0o755)) // others cannot enter the build's directory
	cmd := exec.Command(dir+"/bin", "-test.run=^TestStrangerListens$")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DRIVER_LISTEN="+socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer func() { in.Close(); cmd.Wait() }()
	if _, err := out.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	must(t, os.Chown(dir, 0, 0))
	must(t, os.Lchown(socket, 0, 0)) // the file looks right; the listener is not
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	r := ask(t, c)
	if r.Driver != status.Mismatch || !strings.Contains(r.Reason, "is served by a process") {
		t.Errorf("%+v", r)
	}
	c.cfg.SocketOwner = trust.Anybody
	c.cfg.Timeout = 50_000_000
	if r := ask(t, c); r.Driver != status.Starting {
		t.Errorf("with the checks off: %+v", r)
	}
}
