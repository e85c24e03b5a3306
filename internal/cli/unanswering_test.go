package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// The file system of one of 20 drivers does not answer, at the start and while the daemon runs:
// READY, status, reload, the watchdog, the stop and the other 19 drivers are not affected. When it
// answers again, its driver is registered too.
func TestHangingFileSystem(t *testing.T) {
	t.Parallel() // it mostly waits
	n := newHangingNode(t, 20)
	usual := n.start()
	n.registered(n.names)
	usualStop := n.stop()
	if err := n.manager.Drop(); err != nil { // all drivers are published again
		t.Fatal(err)
	}
	others := n.names[1:]

	n.hang()
	begun := time.Now()
	took := n.start()
	for tries := 1; took > usual+time.Second && tries < slowTries; tries++ {
		n.stop()
		took = n.start()
	}
	t.Logf("ready after %s, usually %s", took, usual)
	if took > usual+time.Second {
		t.Error("READY=1 waits for the file system")
	}
	n.registered(others)
	t.Logf("the other drivers were registered after %s", time.Since(begun))
	n.unimpaired(others)
	if err := n.fs.Resume(); err != nil {
		t.Fatal(err)
	}
	begun = time.Now()
	n.registered(n.names)
	t.Logf("its driver was registered %s after it answered again", time.Since(begun))

	n.hang()
	n.first.Kill() // its connection breaks, so its socket is looked at
	n.unimpaired(others)
	n.fed()
	took = n.stop()
	for tries := 1; took > usualStop+time.Second && tries < slowTries; tries++ {
		n.start()
		n.registered(others)
		took = n.stop()
	}
	t.Logf("stopped after %s, usually %s", took, usualStop)
	if took > usualStop+time.Second {
		t.Error("the stop waits for the file system")
	}
}

// slowTries is how often a start or a stop may be slow: a wait for the file system takes its time
// in each, a busy machine does not.
const slowTries = 3

// A symbolic link in plugins_registry to a file system that does not answer delays publications no
// longer than the limit for it.
func TestLinkToAHangingFileSystem(t *testing.T) {
	n := newHangingNode(t, 3)
	if err := os.Symlink(filepath.Join(n.root, "hang/other"), filepath.Join(n.registry, "other-reg.sock")); err != nil {
		t.Fatal(err)
	}
	n.hang()
	n.start()
	// The kubelet follows the link and hangs too.
	n.eventually("the other drivers are published", func() bool {
		s := n.status()
		return !slices.ContainsFunc(n.names[1:], func(name string) bool {
			d, _ := s.Driver(name)
			return d.State != string(status.Published) && d.State != string(status.Registered)
		})
	})
	n.stop()
}

// hangingNode is a node whose first driver is on a file system that can hang.
type hangingNode struct {
	daemonNode
	registry string
	names    []string
	first    *fake.Driver
	fs       *fake.HangFS
	client   *control.Client
}

func newHangingNode(t *testing.T, drivers int) *hangingNode {
	t.Helper()
	root := fake.ShortDir(t)
	n := &hangingNode{daemonNode: daemonNode{T: t, root: root, log: newOutput()},
		registry: filepath.Join(root, "k/plugins_registry"), client: control.NewClient(control.Path(root))}
	for _, dir := range []string{n.registry, filepath.Join(root, "etc/csi-registrar"), filepath.Join(root, "hang")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	n.fs, err = fake.MountHangFS(filepath.Join(root, "hang"))
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
		if os.Getenv("CI") == "true" {
			t.Fatal("cannot mount a file system that hangs, which CI requires: ", err)
		}
		t.Skip("a file system that hangs needs root and FUSE: ", err)
	}
	if err == nil {
		n.manager, err = fake.StartManager(root)
	}
	if err != nil {
		t.Fatal(err)
	}
	kubelet, err := fake.StartKubelet(n.registry, fake.NewAPIServer(), func(fake.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(n.fs.Close(), kubelet.Stop(), n.manager.Close()); err != nil {
			t.Error(err)
		}
	})
	conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(root, "k"))
	for i := range drivers {
		name := fmt.Sprintf("d%d.example", i)
		socket := filepath.Join(root, name)
		if i == 0 {
			socket = filepath.Join(root, "hang", name)
		}
		d := fake.NewDriver(socket, fake.Healthy(name))
		if _, err := d.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Kill)
		n.names = append(n.names, name)
		if i == 0 {
			n.first = d
		}
		conf += fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", name, socket)
	}
	if err := os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *hangingNode) hang() {
	n.Helper()
	if err := n.fs.Hang(); err != nil {
		n.Fatal(err)
	}
}

// start starts the daemon and returns how long READY=1 took.
func (n *hangingNode) start() time.Duration {
	n.Helper()
	begun := time.Now()
	n.daemonNode.start("WATCHDOG_USEC=1000000")
	return time.Since(begun)
}

// stop ends the daemon and returns how long that took.
func (n *hangingNode) stop() time.Duration {
	n.Helper()
	begun := time.Now()
	if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
		n.Fatal(err)
	}
	if err := n.daemon.Wait(); err != nil {
		n.Error(err)
	}
	return time.Since(begun)
}

// unimpaired checks that everything else works while the file system does not answer.
func (n *hangingNode) unimpaired(others []string) {
	n.Helper()
	n.eventually("status names the file system", func() bool {
		return slices.ContainsFunc(n.status().Stuck, func(s status.StuckCall) bool { return strings.HasPrefix(string(s.Path), filepath.Join(n.root, "hang")) })
	})
	// The watcher's walk may have been abandoned before the driver was asked.
	n.eventually("its driver's reason says so", func() bool {
		first, _ := n.status().Driver(n.names[0])
		return strings.Contains(first.Reason, "does not answer")
	})
	begun := time.Now()
	if _, err := n.client.Reload(n.Context(), false); err != nil {
		n.Error(err)
	}
	if took := time.Since(begun); took > 2*time.Second {
		n.Errorf("reload took %s", took)
	}
	var restored []time.Duration
	for _, name := range others {
		path := filepath.Join(n.registry, name+"-reg.sock")
		if err := os.Remove(path); err != nil {
			n.Fatal(err)
		}
		begun := time.Now()
		n.eventually("the registration socket of "+name+" is restored", func() bool { _, err := os.Lstat(path); return err == nil })
		restored = append(restored, time.Since(begun))
	}
	slices.Sort(restored)
	n.Logf("registration sockets restored after %s, at most %s", restored[len(restored)/2], restored[len(restored)-1])
	if median := restored[len(restored)/2]; median > time.Second {
		n.Errorf("registration sockets are restored after %s", median)
	}
	n.registered(others)
	fed := n.manager.State().Watchdog
	n.eventually("the watchdog is fed", func() bool { return n.manager.State().Watchdog >= fed+3 })
}

// fed checks for a second, or for HANG_FOR, that the watchdog is fed. WatchdogSec is a second here;
// a busy machine may be late once.
func (n *hangingNode) fed() {
	n.Helper()
	long, err := time.ParseDuration(cmp.Or(os.Getenv("HANG_FOR"), "1s"))
	if err != nil {
		n.Fatal(err)
	}
	last, count, longest := time.Now(), n.manager.State().Watchdog, time.Duration(0)
	for end := last.Add(long); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if now := n.manager.State().Watchdog; now != count {
			longest = max(longest, time.Since(last))
			last, count = time.Now(), now
		}
	}
	longest = max(longest, time.Since(last))
	n.Logf("in %s the watchdog waited for %s at most", long, longest)
	if longest > 5*time.Second {
		n.Errorf("the watchdog was not fed for %s", longest)
	}
}

func (n *hangingNode) status() status.Document {
	n.Helper()
	s, err := n.client.Status(n.Context())
	if err != nil {
		n.Fatalf("%v\n%s", err, n.log)
	}
	return s
}

func (n *hangingNode) registered(names []string) {
	n.Helper()
	n.eventually("all are registered", func() bool {
		s := n.status()
		return !slices.ContainsFunc(names, func(name string) bool {
			d, _ := s.Driver(name)
			return d.State != string(status.Registered)
		})
	})
}
