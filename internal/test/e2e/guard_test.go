package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/e2e/harness"
)

// Users and scripts remove, replace and change a registration socket. The kubelet sees that the
// path disappears, so it must see that it appears again.
func TestRegistrationSocketRestored(t *testing.T) {
	t.Parallel()
	away := func(n *harness.Node, path string) error { return os.Rename(path, filepath.Join(n.Dir, "away")) }
	cases := map[string]struct {
		do func(n *harness.Node, path string) error
		// seen: the kubelet sees the change and registers again; a rename away it does not
		// see, but the new socket it does.
		foreign bool // the daemon must not remove what took its place
	}{
		"removed":      {do: func(_ *harness.Node, path string) error { return os.Remove(path) }},
		"renamed away": {do: away},
		"replaced by a file": {foreign: true, do: func(n *harness.Node, path string) error {
			return swap(n, path, func(theirs string) error { return os.WriteFile(theirs, []byte("mine"), 0o600) })
		}},
		"replaced by a directory": {foreign: true, do: func(n *harness.Node, path string) error {
			return swap(n, path, func(theirs string) error { return os.Mkdir(theirs, 0o755) })
		}},
		"replaced by a link": {foreign: true, do: func(n *harness.Node, path string) error {
			return swap(n, path, func(theirs string) error { return os.Symlink("/nowhere", theirs) })
		}},
		"replaced by a dead socket": {do: func(n *harness.Node, path string) error {
			dead := filepath.Join(n.Dir, "dead")
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
			if err != nil {
				return err
			}
			l.SetUnlinkOnClose(false)
			if err := l.Close(); err != nil {
				return err
			}
			return os.Rename(dead, path)
		}},
	}
	for what, tc := range cases {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n, d, c, k := registered(t, "a.example")
			path := n.RegSocket(d.Name)
			mark := k.Mark()
			if err := tc.do(n, path); err != nil {
				t.Fatal(err)
			}
			if tc.foreign {
				theirs := n.Inode(path)
				s := c.WaitState(d.Name, "conflict", soon)
				contains(t, "the reason", s.Reason, path)
				harness.Never(t, time.Second, "another's file was removed", func() string {
					if fi, err := os.Lstat(path); err != nil || n.Inode(path) != theirs {
						return what + " " + errText(err) + fi.Name()
					}
					return ""
				})
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
			}
			k.Registered(mark, d.Name, soon)
			s := c.WaitState(d.Name, "registered", soon)
			if s.Republications == 0 {
				t.Errorf("status counts no republication: %+v", s)
			}
			k.Quiet(k.Mark(), 2500*time.Millisecond)
		})
	}
}

// swap replaces the socket in one step. In two steps, the daemon would be faster.
func swap(n *harness.Node, path string, create func(theirs string) error) error {
	theirs := filepath.Join(n.Dir, "theirs")
	if err := create(theirs); err != nil {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, theirs, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
}

func errText(err error) string {
	if err != nil {
		return err.Error()
	}
	return ""
}

// A user who removes the socket repeatedly must not cause endless registrations: it is restored 20
// times at once, then after 10 s and more, or on request.
func TestRegistrationSocketRemovedAgainAndAgain(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	path := n.RegSocket(d.Name)
	mark := k.Mark()
	removed := 0
	var s harness.DriverStatus
	harness.Eventually(t, time.Minute, "damped", func() string {
		if err := os.Remove(path); err == nil {
			removed++
		}
		if s = c.Driver(d.Name); s.DampedUntil.IsZero() {
			return fmt.Sprintf("removed %d times: %+v", removed, s)
		}
		return ""
	})
	if removed != 21 || s.Republications != 20 {
		t.Errorf("damped after %d removals and %d republications, want 21 and 20", removed, s.Republications)
	}
	if s.State != "ready" {
		t.Errorf("state %q without a registration socket, want ready", s.State)
	}
	contains(t, "the reason", s.Reason, "20 times within an hour", "removed", s.DampedUntil.UTC().Format(time.TimeOnly))
	if in := time.Until(s.DampedUntil); in > 10*time.Second {
		t.Errorf("restored in %v, want 10 s at most", in)
	}
	if out, errs, code := n.RunCommand("reregister", d.Name, "--config-root", n.Etc); code != 0 {
		t.Fatalf("reregister: %d %s%s", code, out, errs)
	}
	s = c.WaitState(d.Name, "registered", soon)
	if !s.DampedUntil.IsZero() || s.Reason != "" {
		t.Errorf("registered, and still: %+v", s)
	}
	if seen := k.Count(mark, "register", d.Name); seen > s.Republications {
		t.Errorf("%d registrations for %d republications", seen, s.Republications)
	}
	harness.Eventually(t, soon, "the kubelet has it", func() string {
		if _, ok := k.CSINode()[d.Name]; !ok {
			return "not in CSINode"
		}
		return ""
	})
}

// The directory is removed, moved, or covered by a mount. The kubelet keeps watching the old one:
// the socket is restored, and a message says that the kubelet must be restarted.
func TestRegistryDirectory(t *testing.T) {
	t.Parallel()
	cases := map[string]func(t *testing.T, n *harness.Node){
		"removed": func(t *testing.T, n *harness.Node) {
			rmRF(t, n.Registry())
		},
		"removed and recreated": func(t *testing.T, n *harness.Node) {
			rmRF(t, n.Registry())
			// The daemon may be faster.
			if err := os.Mkdir(n.Registry(), 0o755); err != nil && !os.IsExist(err) {
				t.Fatal(err)
			}
		},
		"renamed": func(t *testing.T, n *harness.Node) {
			if err := os.Rename(n.Registry(), n.Root+"/moved"); err != nil {
				t.Fatal(err)
			}
		},
		"mounted over": func(t *testing.T, n *harness.Node) {
			if err := unix.Mount("tmpfs", n.Registry(), "tmpfs", 0, "mode=0755,size=1m"); err != nil {
				harness.Skip(t, "it needs to mount a tmpfs: "+err.Error())
			}
			t.Cleanup(func() {
				if err := unix.Unmount(n.Registry(), unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
		},
	}
	for what, do := range cases {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.AddDriver("a.example")
			d.Start()
			k := n.StartKubelet()
			t.Cleanup(func() { os.RemoveAll(n.Root + "/moved") })
			c := n.StartDaemon()
			k.Registered(0, d.Name, soon)
			c.WaitState(d.Name, "registered", soon)
			did := time.Now()
			do(t, n)
			at, ok := harness.WhenAccepts(n.RegSocket(d.Name), soon)
			if !ok {
				t.Fatalf("not restored: %+v", c.Driver(d.Name))
			}
			t.Logf("restored within %v", at.Sub(did))
			s := c.WaitStatus(d.Name, "that the kubelet must be restarted", soon, func(s harness.DriverStatus) bool {
				return s.State == "published" && strings.Contains(s.Reason, "restart") && strings.Contains(s.Reason, "kubelet")
			})
			t.Logf("said: %s", s.Reason)
			k.Kill()
			k = n.StartKubelet()
			k.Registered(0, d.Name, soon)
			s = c.WaitState(d.Name, "registered", soon)
			if s.Reason != "" {
				t.Errorf("registered, and still: %s", s.Reason)
			}
		})
	}
}

// `kubeadm reset` stops the kubelet and removes its whole root directory while the daemon runs. The
// daemon does not interfere, and everything is registered with the next kubelet.
func TestRootDirectoryRemoved(t *testing.T) {
	t.Parallel()
	for i := range 4 { // five times each: what happens more often within an hour is delayed
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			names := numbered("d%d.example", 5)
			for _, name := range names {
				n.AddDriver(name).Start()
			}
			c := n.StartDaemon()
			k := n.StartKubelet()
			for range 5 {
				for _, name := range names {
					k.Registered(0, name, soon)
					c.WaitState(name, "registered", soon)
				}
				k.Kill()
				// More to remove.
				if err := os.CopyFS(filepath.Join(n.Root, "pods"), os.DirFS(n.Etc+"/etc")); err != nil {
					t.Fatal(err)
				}
				rmRF(t, n.Root)
				for _, name := range names {
					s := c.WaitStatus(name, "that the root directory is missing", soon, func(s harness.DriverStatus) bool {
						return strings.Contains(s.Reason, n.Root+" does not exist")
					})
					if s.State != "ready" {
						t.Errorf("%s: state %q without a root directory, want ready", name, s.State)
					}
				}
				if _, err := os.Lstat(n.Root); err == nil {
					t.Error("the kubelet's root directory was made again: that is the kubelet's")
				}
				if err := os.Mkdir(n.Root, 0o755); err != nil {
					t.Fatal(err)
				}
				k = n.StartKubelet()
			}
			for _, name := range names {
				k.Registered(0, name, soon)
				if s := c.WaitState(name, "registered", soon); s.Republications != 5 || s.Reason != "" {
					t.Errorf("%s: status has %+v, want 5 republications", name, s)
				}
			}
		})
	}
}

// rmRF removes a directory like rm -rf. It tries once.
func rmRF(t *testing.T, path string) {
	t.Helper()
	out, err := exec.Command("rm", "-rf", path).CombinedOutput()
	if err != nil {
		t.Errorf("rm -rf: %v: %s", err, out)
	}
}

// At the start neither the directory nor the kubelet exists: the daemon creates the directory, and
// the kubelet that starts later finds the socket. A missing root_dir is reported.
func TestRegistryMissing(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.AddDriver("a.example")
	d.Start()
	if err := os.RemoveAll(n.Root); err != nil {
		t.Fatal(err)
	}
	c := n.StartDaemon()
	s := c.WaitStatus(d.Name, "a reason", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" && s.Reason != "" })
	contains(t, "the reason", s.Reason, n.Root)
	if _, err := os.Lstat(n.Root); err == nil {
		t.Errorf("the kubelet's root was made: that is the kubelet's, or a mount's")
	}
	if err := os.Mkdir(n.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, ok := harness.WhenAccepts(n.RegSocket(d.Name), soon); !ok {
		t.Fatalf("not published after root_dir came: %+v", c.Driver(d.Name))
	}
	if fi, err := os.Stat(n.Registry()); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("plugins_registry: %v %v, want mode 0750", fi.Mode(), err)
	}
	if fi, err := os.Lstat(n.RegSocket(d.Name)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("registration socket: %v %v, want mode 0600", fi.Mode(), err)
	}
	k := n.StartKubelet()
	k.Registered(0, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
}

// The daemon survives a full and a read-only file system, and reports them.
func TestRegistryFullOrReadOnly(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		options string // of the tmpfs
		hurt    func(n *harness.Node) error
		fix     func(n *harness.Node) error
		word    string
	}{
		"no inodes": {
			options: "mode=0755,nr_inodes=16",
			hurt: func(n *harness.Node) error {
				for i := range 32 {
					if err := os.WriteFile(filepath.Join(n.Registry(), "full"+string(rune('a'+i))), nil, 0o600); err != nil {
						return nil // full
					}
				}
				return nil
			},
			fix: func(n *harness.Node) error {
				for i := range 32 {
					os.Remove(filepath.Join(n.Registry(), "full"+string(rune('a'+i))))
				}
				return nil
			},
			word: "space",
		},
		"read-only": {
			options: "mode=0755",
			hurt: func(n *harness.Node) error {
				return unix.Mount("", n.Root, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
			},
			fix:  func(n *harness.Node) error { return unix.Mount("", n.Root, "", unix.MS_REMOUNT, "") },
			word: "read-only",
		},
	}
	for what, tc := range cases {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			if err := unix.Mount("tmpfs", n.Root, "tmpfs", 0, tc.options); err != nil {
				harness.Skip(t, "it needs to mount a tmpfs: "+err.Error())
			}
			t.Cleanup(func() {
				if err := unix.Unmount(n.Root, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
			if err := os.Mkdir(n.Registry(), 0o755); err != nil {
				t.Fatal(err)
			}
			d := n.AddDriver("a.example")
			k := n.StartKubelet()
			c := n.StartDaemon()
			if err := tc.hurt(n); err != nil {
				t.Fatal(err)
			}
			d.Start()
			s := c.WaitStatus(d.Name, "a reason", soon, func(s harness.DriverStatus) bool { return s.Driver == "ready" && s.Reason != "" })
			contains(t, "the reason", s.Reason, tc.word)
			// Retried many times, logged once.
			harness.Never(t, 4*time.Second, "the log repeats itself", func() string {
				if lines := strings.Count(c.Log(), "level=WARN"); lines > 3 {
					return c.Log()
				}
				return ""
			})
			if err := tc.fix(n); err != nil {
				t.Fatal(err)
			}
			k.Registered(0, d.Name, soon)
			c.WaitState(d.Name, "registered", soon)
		})
	}
}
