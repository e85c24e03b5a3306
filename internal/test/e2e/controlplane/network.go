package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Network is a network namespace with only a loopback interface. It exists as long as the test,
// whatever is started, rebooted or cut off in it.
type Network struct {
	namespace, host *os.File
}

// NewNetwork creates a network namespace, which needs root.
func NewNetwork(t testing.TB) *Network {
	t.Helper()
	host, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	n := &Network{host: host}
	t.Cleanup(func() { n.host.Close() })
	if err := n.make(); err != nil {
		t.Fatalf("cannot make a network namespace: %v", err)
	}
	t.Cleanup(func() { n.namespace.Close() })
	return n
}

// make creates the namespace by switching one thread to a new one and back.
func (n *Network) make() (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Setns(int(n.host.Fd()), unix.CLONE_NEWNET)) }()
	if n.namespace, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo)
}

// Path returns a path of the namespace that is valid while the test process runs.
func (n *Network) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.namespace.Fd())
}

// Command returns a command that runs in the namespace.
func (n *Network) Command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--net=" + n.Path(), "--"}, args...)...)
}

// Do runs f, and the programs that f starts, in the namespace.
func (n *Network) Do(f func()) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setns(int(n.namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Setns(int(n.host.Fd()), unix.CLONE_NEWNET)) }()
	f()
	return nil
}

// Dial connects to a literal address in the namespace.
func (n *Network) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	inside := n.Do(func() { conn, err = (&net.Dialer{}).DialContext(ctx, network, address) })
	return conn, errors.Join(err, inside)
}
