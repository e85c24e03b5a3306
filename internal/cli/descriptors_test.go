package cli

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
)

// With any descriptors in the store, the daemon starts at once, keeps its registrations, does not
// serve foreign sockets, and removes from the store what it does not use.
func TestJunkInTheDescriptorStore(t *testing.T) {
	n := newLinkedNode(t)
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
		"registration-" + linkedName: {pipe},
		"registration-gone.example":  {listener},
		"registration-../../etc":     {listener},
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
	n.eventually("the store has only the registration, and the kubelet's process", func() bool {
		return slices.Equal(slices.Sorted(slices.Values(n.manager.Stored())), []string{"kubelet", "registration-" + linkedName})
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

// store puts a descriptor into the store, beside others of its name.
func (n *linkedNode) store(name string, c syscall.Conn) {
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
