package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"csi-registrar/internal/control"
	"csi-registrar/internal/fake"
	"csi-registrar/internal/status"
)

// asKubelet makes the test's binary be a kubelet that watches a directory, until it is killed.
const asKubelet = "CSI_REGISTRAR_TEST_AS_KUBELET"

func runKubelet(dir string) int {
	if _, err := fake.StartKubelet(dir, fake.NewAPIServer(), func(fake.Event) {}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	select {}
}

// startKubelet starts a kubelet in a process of its own, and returns a function that kills it.
func (n *linkedNode) startKubelet() (pid int, kill func()) {
	n.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asKubelet+"="+filepath.Join(n.root, "k/plugins_registry"))
	cmd.Stderr = n.log
	if err := cmd.Start(); err != nil {
		n.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill() // fails once it has ended
		_ = cmd.Wait()
	}
	n.Cleanup(kill)
	return cmd.Process.Pid, kill
}

func (n *linkedNode) document() status.Document {
	n.Helper()
	doc, err := control.NewClient(control.Path(n.root)).Status(n.Context())
	if err != nil {
		n.Fatal(err)
	}
	s, err := doc.Status()
	if err != nil {
		n.Fatal(err)
	}
	return s
}

// The end of the kubelet that confirmed a registration is shown until another one reports, also by
// a daemon that was started after the kubelet confirmed, or after it ended.
func TestStatusShowsThatTheKubeletEnded(t *testing.T) {
	root := fake.ShortDir(t)
	n := &linkedNode{T: t, root: root, socket: filepath.Join(root, "d.sock"), log: newOutput()}
	d := fake.NewDriver(n.socket, fake.Healthy(linkedName))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	var err error
	if n.manager, err = fake.StartManager(root); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.manager.Close() })
	conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", filepath.Join(root, "k"), linkedName, n.socket)
	etc := filepath.Join(root, "etc/csi-registrar")
	if err := errors.Join(os.MkdirAll(etc, 0o755), os.WriteFile(filepath.Join(etc, "config.toml"), []byte(conf), 0o644), os.Mkdir(filepath.Join(root, "k"), 0o755)); err != nil {
		t.Fatal(err)
	}
	n.start()
	pid, kill := n.startKubelet()
	n.eventually("the driver is registered", func() bool { return n.state().State == string(status.Registered) })
	if k := n.document().Kubelet; k.PID != pid || !k.EndedAt.IsZero() {
		t.Errorf("the kubelet is %+v, want pid %d", k, pid)
	}
	shown := func() {
		t.Helper()
		n.eventually("the end is shown", func() bool { return !n.document().Kubelet.EndedAt.IsZero() })
		s := n.document()
		reason, _ := s.Driver(linkedName)
		want := fmt.Sprintf("the kubelet (pid %d) that confirmed this ended ", pid)
		if !strings.HasPrefix(reason.Reason, want) || !strings.HasSuffix(reason.Reason, " ago; none has asked since") || reason.State != string(status.Registered) {
			t.Errorf("%s: %q, want %q", reason.State, reason.Reason, want)
		}
		// like /readyz
		if code, _, text := try(t, "wait", "--timeout", "10s", "--config-root", root); code != 0 {
			t.Errorf("wait ends with %d: %s", code, text)
		}
		line := fmt.Sprintf("; the kubelet (pid %d) ended at ", pid)
		n.eventually("systemd shows it", func() bool { return strings.Contains(n.manager.State().Status, line) })
		if _, text, _ := try(t, "status", "--config-root", root); !strings.Contains(text, fmt.Sprintf("the kubelet (pid %d) ended ", pid)) {
			t.Errorf("status prints\n%s", text)
		}
	}
	kill()
	shown()
	n.restart(syscall.SIGKILL) // the next daemon only has the pidfd of a process that has ended
	shown()

	pid, kill = n.startKubelet()
	n.eventually("another kubelet has reported", func() bool { return n.document().Kubelet.PID == pid })
	if got := n.state(); got.Reason != "" || got.State != string(status.Registered) {
		t.Errorf("%s: %q", got.State, got.Reason)
	}
	n.restart(syscall.SIGTERM) // the next daemon gets the pidfd of a running process
	if k := n.document().Kubelet; k.PID != pid || !k.EndedAt.IsZero() {
		t.Errorf("the kubelet is %+v, want pid %d", k, pid)
	}
	kill()
	shown()
}
