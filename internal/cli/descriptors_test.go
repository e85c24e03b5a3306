package cli

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// With any descriptors in the store, the daemon starts at once, keeps its registrations, does not
// serve foreign sockets, and removes from the store what it does not use.
func TestJunkInTheDescriptorStore(t *testing.T) {
	t.Parallel() // it mostly waits
	n := newRegisteredNode(t)
	if err := n.daemon.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = n.daemon.Wait() // killed

	pipe, other, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	defer other.Close()
	foreign := filepath.Join(n.root, "foreign.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: foreign, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	n.manager.SetMost(1 << 13)
	junk := map[string][]syscall.Conn{
		"control": {pipe, listener}, "http": {pipe}, "other": {listener},
		"registration-" + registeredName: {pipe}, registeredName: {pipe},
		"registration-gone.example": {listener}, "registration-gone2.example": {pipe},
		"registration-../../etc": {listener},
	}
	for i := range 4000 {
		junk[fmt.Sprintf("junk-%d", i)] = []syscall.Conn{pipe}
	}
	all := len(n.manager.Stored())
	for name, conns := range junk {
		for _, c := range conns {
			n.store(name, c)
			all++
		}
	}
	n.eventually("all is in the store", func() bool { return len(n.manager.Stored()) == all })
	listener.Close()

	// A slow service manager must not delay the start.
	n.manager.SetDelay(3 * time.Millisecond)
	begun := time.Now()
	n.start()
	if took := time.Since(begun); took > 6*time.Second {
		t.Errorf("READY=1 took %s", took)
	}
	n.manager.SetDelay(0)
	n.eventually("the driver is registered", func() bool { return n.state().State == string(status.Registered) })
	if got := n.deregistered.Load(); got != 0 {
		t.Errorf("the kubelet saw the driver go %d times\n%s", got, n.log)
	}
	n.eventually("the store has only the registration", func() bool {
		return slices.Equal(slices.Sorted(slices.Values(n.manager.Stored())), []string{"registration-" + registeredName})
	})
	if c, err := net.Dial("unix", foreign); err == nil {
		c.Close()
		t.Error("the daemon listens on the foreign socket")
	}
	n.restart(os.Interrupt)
	n.eventually("the driver is registered", func() bool { return n.state().State == string(status.Registered) })
	if got := n.deregistered.Load(); got != 0 {
		t.Errorf("the kubelet saw the driver go %d times\n%s", got, n.log)
	}
}

// registeredNode is a node with a service manager, a kubelet and a driver that is registered.
type registeredNode struct {
	daemonNode
	driver       *fake.Driver
	deregistered atomic.Int64
}

const registeredName = "registered.example"

func newRegisteredNode(t *testing.T) *registeredNode {
	t.Helper()
	root := fake.ShortDir(t)
	n := &registeredNode{daemonNode: daemonNode{T: t, root: root, log: newOutput()}}
	d := fake.NewDriver(filepath.Join(root, "d.sock"), fake.Healthy(registeredName))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	n.driver = d
	t.Cleanup(d.Kill)
	manager, err := fake.StartManager(root)
	if err != nil {
		t.Fatal(err)
	}
	n.manager = manager
	kubelet, err := fake.StartKubelet(filepath.Join(root, "k/plugins_registry"), fake.NewAPIServer(), func(e fake.Event) {
		if e.What == fake.Deregistered {
			n.deregistered.Add(1)
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
	conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", filepath.Join(root, "k"), registeredName, filepath.Join(root, "d.sock"))
	if err := errors.Join(os.MkdirAll(filepath.Join(root, "etc/csi-registrar"), 0o755), os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644)); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.eventually("the driver is registered", func() bool { return n.state().State == string(status.Registered) })
	// A daemon that is killed before its answer arrives loses the registration.
	n.eventually("the kubelet has the answer to its notification", kubelet.Idle)
	return n
}

// restart ends the daemon with a signal and starts another.
func (n *registeredNode) restart(s os.Signal) {
	n.Helper()
	if err := n.daemon.Process.Signal(s); err != nil {
		n.Fatal(err)
	}
	_ = n.daemon.Wait()
	n.start()
}

func (n *registeredNode) state() status.Driver {
	n.Helper()
	// Empty if the daemon does not answer.
	s, _ := control.NewClient(control.Path(n.root)).Status(n.Context())
	d, _ := s.Driver(registeredName)
	return d
}

// store puts a descriptor into the store, beside others of its name.
func (n *registeredNode) store(name string, c syscall.Conn) {
	n.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		n.Fatal(err)
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.manager.SocketPath(), Net: "unixgram"})
	if err != nil {
		n.Fatal(err)
	}
	defer conn.Close()
	manager, err := conn.SyscallConn()
	if err != nil {
		n.Fatal(err)
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		sendErr = manager.Write(func(to uintptr) bool {
			message := []byte("FDSTORE=1\nFDPOLL=0\nFDNAME=" + name)
			err := syscall.Sendmsg(int(to), message, syscall.UnixRights(int(fd)), nil, 0)
			return err != syscall.EAGAIN
		})
	})
	if err != nil || sendErr != nil {
		n.Fatal(err, sendErr)
	}
}
