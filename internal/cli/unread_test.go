package cli

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// unreadNode is a node on which nobody reads the daemon's log. It has a driver that serves, and
// many that do not, each with its own entries.
type unreadNode struct {
	daemonNode
	unanswered chan fake.Event
	registered chan fake.Event
}

func newUnreadNode(t *testing.T, format string) *unreadNode {
	t.Helper()
	root := fake.ShortDir(t)
	registry := filepath.Join(root, "k/plugins_registry")
	n := &unreadNode{daemonNode{T: t, root: root, log: newOutput()}, make(chan fake.Event, 100), make(chan fake.Event, 100)}
	for _, dir := range []string{registry, filepath.Join(root, "etc/csi-registrar"), filepath.Join(root, "run")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	conf := fmt.Sprintf("[log]\nformat = %q\n[kubelet]\nroot_dir = %q\n", format, filepath.Join(root, "k"))
	for i := range 40 {
		conf += fmt.Sprintf("[driver.\"d%d.example\"]\nsocket = %q\nsocket_owner = \"any\"\n", i, filepath.Join(root, fmt.Sprintf("d%d.sock", i)))
	}
	if err := os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	d := fake.NewDriver(filepath.Join(root, "d0.sock"), fake.Healthy("d0.example"))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	var err error
	if n.manager, err = fake.StartManager(root); err != nil {
		t.Fatal(err)
	}
	kubelet, err := fake.StartKubelet(registry, fake.NewAPIServer(), func(e fake.Event) {
		switch e.What {
		case fake.Registered:
			n.registered <- e
		case fake.Unanswered: // GetInfo took more than a second
			n.unanswered <- e
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(kubelet.Stop(), n.manager.Close()); err != nil {
			t.Error(err)
		}
	})
	return n
}

// goesOn checks that the daemon registers its driver, feeds its watchdog, answers the kubelet, also
// when everything changes, and ends.
func (n *unreadNode) goesOn() {
	n.Helper()
	n.start("WATCHDOG_USEC=1000000")
	n.isRegistered()
	for i := range 2 {
		fed := n.manager.State().Watchdog
		if err := os.Remove(filepath.Join(n.root, "k/plugins_registry/d0.example-reg.sock")); err != nil {
			n.Fatal(err)
		}
		n.eventually(fmt.Sprintf("the socket is restored (%d)", i), func() bool {
			_, err := os.Lstat(filepath.Join(n.root, "k/plugins_registry/d0.example-reg.sock"))
			return err == nil
		})
		n.isRegistered()
		n.eventually("the watchdog is fed", func() bool { return n.manager.State().Watchdog >= fed+2 })
	}
	select {
	case e := <-n.unanswered:
		n.Errorf("the kubelet was not answered within a second: %+v", e)
	default:
	}
	begun := time.Now()
	if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
		n.Fatal(err)
	}
	kill := time.AfterFunc(20*time.Second, func() { _ = n.daemon.Process.Kill() })
	defer kill.Stop()
	if err := n.daemon.Wait(); err != nil {
		n.Error(err)
	}
	if took := time.Since(begun); took > 5*time.Second {
		n.Errorf("the daemon ended %s after SIGTERM", took)
	}
}

// isRegistered waits for the kubelet.
func (n *unreadNode) isRegistered() {
	n.Helper()
	select {
	case <-n.registered:
	case <-time.After(20 * time.Second):
		n.Fatalf("the kubelet did not register the driver\n%s", n.log)
	}
}

// TestJournaldDoesNotRead: with a queue that is full at the start, or soon after.
func TestJournaldDoesNotRead(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, c := range []struct {
		name string
		full bool
	}{{"full at the start", true}, {"full later", false}} {
		t.Run(c.name, func(t *testing.T) {
			n := newUnreadNode(t, "journal")
			journald, err := n.startJournald()
			if err != nil {
				t.Fatal(err)
			}
			defer journald.Close()
			if c.full {
				if err := fake.FillDatagrams(journald.LocalAddr().String()); err != nil {
					t.Fatal(err)
				}
			}
			n.goesOn()
		})
	}
}

// TestJournaldReadsAgain: nothing is lost that waited for it.
func TestJournaldReadsAgain(t *testing.T) {
	t.Parallel() // it mostly waits
	n := newUnreadNode(t, "journal")
	journald, err := n.startJournald()
	if err != nil {
		t.Fatal(err)
	}
	defer journald.Close()
	if err := fake.FillDatagrams(journald.LocalAddr().String()); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.isRegistered()
	if err := journald.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	for entry, ready := make([]byte, 64<<10), false; !ready; {
		size, err := journald.Read(entry)
		if err != nil {
			t.Fatal(err, n.log)
		}
		ready = bytes.Contains(entry[:size], []byte("MESSAGE=ready ")) && bytes.Contains(entry[:size], []byte("\nMESSAGE_ID="))
	}
	if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := n.daemon.Wait(); err != nil || n.log.String() != "" {
		t.Errorf("%v; on standard error %q", err, n.log)
	}
}

// startJournald starts what listens at journald's socket in the daemon's mount namespace.
func (n *unreadNode) startJournald() (*net.UnixConn, error) {
	run := filepath.Join(n.root, "run")
	n.prepare = func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		c.Env = append(c.Env, withRun+"="+run)
	}
	probe := exec.Command(os.Args[0], "version")
	n.prepare(probe)
	probe.Env = append(os.Environ(), asProgram+"=1", withRun+"="+run)
	if out, err := probe.CombinedOutput(); err != nil {
		if os.Getenv("CI") == "true" {
			n.Fatal("cannot make a mount namespace, which CI requires: ", err, string(out))
		}
		n.Skip("a mount namespace needs root: ", err, string(out))
	}
	if err := os.MkdirAll(filepath.Join(run, "systemd/journal"), 0o755); err != nil {
		return nil, err
	}
	return net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(run, "systemd/journal/socket"), Net: "unixgram"})
}

// TestNobodyReadsStandardError: a pipe that is full from the start.
func TestNobodyReadsStandardError(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			n := newUnreadNode(t, format)
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			defer w.Close()
			if err := fill(w); err != nil {
				t.Fatal(err)
			}
			n.prepare = func(c *exec.Cmd) { c.Stderr = w }
			n.goesOn()
		})
	}
}

// TestTheLastErrorIsNotRead: a daemon that fails ends although nobody reads why.
func TestTheLastErrorIsNotRead(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if err := fill(w); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "run", "--config-root", fake.ShortDir(t), "--http-endpoint", "256.0.0.1:1")
	cmd.Env, cmd.Stderr = append(os.Environ(), asProgram+"=1"), w
	begun := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("%v after %s, want exit status 1", err, time.Since(begun))
	}
}

// fill fills a pipe. The descriptor blocks again afterwards, as everybody expects of standard
// error.
func fill(w *os.File) error {
	fd := int(w.Fd())
	if err := unix.SetNonblock(fd, true); err != nil {
		return err
	}
	var err error
	for err == nil {
		_, err = unix.Write(fd, make([]byte, 4096))
	}
	if err != unix.EAGAIN {
		return err
	}
	return unix.SetNonblock(fd, false)
}

// TestNoDescriptorLeft: the watchdog is fed by a daemon that can open nothing.
func TestNoDescriptorLeft(t *testing.T) {
	t.Parallel() // it mostly waits
	n := newUnreadNode(t, "text")
	n.start("WATCHDOG_USEC=1000000")
	n.isRegistered()
	limit := unix.Rlimit{Cur: 0, Max: 1 << 10}
	if err := unix.Prlimit(n.daemon.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	fed := n.manager.State().Watchdog
	n.eventually("the watchdog is fed", func() bool { return n.manager.State().Watchdog >= fed+4 })
	if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := n.daemon.Wait(); err != nil {
		t.Error(err)
	}
}
