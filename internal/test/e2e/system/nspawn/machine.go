// Package nspawn boots a real systemd as PID 1 in a container, for tests. The machine can be
// rebooted and switched off, and its power can be cut. Its disk keeps its content.
package nspawn

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Limits for what should take a second; generous, for machines under load.
const (
	bootLimit = 60 * time.Second
	runLimit  = 60 * time.Second
	downLimit = 10 * time.Second // for a command while the machine shuts down
)

// Machine is one container, with a disk of its own over the root of a suite. Only Try and Path may
// be called by several goroutines at once.
type Machine struct {
	Suite string
	// Disk is the machine's disk on the host.
	Disk string
	// Args are additional arguments for systemd-nspawn.
	Args []string
	// Network is the path of the network namespace; "" gives the machine an empty one at each boot.
	Network string

	t       testing.TB
	name    string
	dir     string
	group   cgroup
	nspawn  *exec.Cmd
	ended   <-chan struct{} // closed when nspawn has ended
	leader  int
	console *os.File
}

var serial struct {
	sync.Mutex
	last int
}

// New prepares a machine. It is switched off and removed when the test ends.
func New(t testing.TB, suite string) *Machine {
	t.Helper()
	root := Root(t, suite)
	m := prepare(t, suite)
	for _, sub := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join(m.dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	layers := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", root, m.dir, m.dir)
	if err := syscall.Mount("overlay", m.Disk, "overlay", 0, layers); err != nil {
		t.Fatalf("cannot mount %s: %v", layers, err)
	}
	return m
}

// NewFromImage prepares a machine from two partitions of an image: a copy of the root file system,
// and /usr. systemd-nspawn --image= would need udev.
func NewFromImage(t testing.TB, name, root, usr string) *Machine {
	t.Helper()
	m := prepare(t, name)
	// Not mounted read-only here: whether /usr is writable depends on the image.
	script := `cp --sparse=always "$2" "$1/root" && mount -o loop "$1/root" "$1/disk" && mount -o loop "$3" "$1/disk/usr"`
	if out, err := exec.Command("sh", "-c", script, "sh", m.dir, root, usr).CombinedOutput(); err != nil {
		t.Fatalf("cannot mount the partitions: %v\n%s", err, out)
	}
	return m
}

// prepare makes a machine with an empty disk.
func prepare(t testing.TB, suite string) *Machine {
	t.Helper()
	serial.Lock()
	serial.last++
	name := fmt.Sprintf("csi-%s-%d-%d", suite, os.Getpid(), serial.last)
	serial.Unlock()
	dir, err := os.MkdirTemp("", "nspawn")
	if err != nil {
		t.Fatal(err)
	}
	m := &Machine{Suite: suite, Disk: filepath.Join(dir, "disk"), t: t, name: name, dir: dir}
	t.Cleanup(m.remove)
	if err := os.Mkdir(m.Disk, 0o755); err != nil {
		t.Fatal(err)
	}
	if m.group, err = newCgroup(name); err != nil {
		t.Fatal(err)
	}
	if m.console, err = os.Create(filepath.Join(dir, "console")); err != nil {
		t.Fatal(err)
	}
	return m
}

// During runs do. Meanwhile failures count for t, a subtest of the machine's own test.
func (m *Machine) During(t testing.TB, do func()) {
	outer := m.t
	m.t = t
	defer func() { m.t = outer }()
	do()
}

var environment = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root", "SYSTEMD_PAGER=", "TERM=dumb"}

// Try runs a command in the machine and returns its output, both streams.
func (m *Machine) Try(args ...string) (string, error) { return m.tryFor(runLimit, args...) }

// tryFor is Try with another limit than runLimit, for commands beside a shutdown. PID 1 stops all
// processes before it kills them (systemd, broadcast_signal), nsenter then stops itself as its
// child was, and nothing on the host continues it.
func (m *Machine) tryFor(limit time.Duration, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(m.leader), "-a", "--"}, args...)...)
	cmd.Env = environment
	cmd.WaitDelay = time.Second // a background child may hold the pipe
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Run is Try for commands that must succeed.
func (m *Machine) Run(args ...string) string {
	m.t.Helper()
	out, err := m.Try(args...)
	if err != nil {
		m.t.Fatalf("%s: %q: %v\n%s", m.Suite, args, err, out)
	}
	return out
}

// Start starts a command in the machine. The caller must wait for it.
func (m *Machine) Start(args ...string) *exec.Cmd {
	m.t.Helper()
	cmd := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(m.leader), "-a", "--"}, args...)...)
	cmd.Env = environment
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	return cmd
}

// Leader returns the host's PID of PID 1.
func (m *Machine) Leader() int { return m.leader }

// Signal sends a signal to PID 1.
func (m *Machine) Signal(sig syscall.Signal) {
	m.t.Helper()
	if err := syscall.Kill(m.leader, sig); err != nil {
		m.t.Fatal(err)
	}
}

// Path returns the host's path of a path inside the machine: with the machine's mounts while it
// runs, on its disk while it is off.
func (m *Machine) Path(path string) string {
	if m.leader == 0 {
		return filepath.Join(m.Disk, path)
	}
	return fmt.Sprintf("/proc/%d/root%s", m.leader, path)
}

// Journal returns the journal of the machine. Its arguments are those of journalctl.
func (m *Machine) Journal(args ...string) string {
	out, err := m.Try(append([]string{"journalctl", "--no-pager", "--quiet", "--output=short-precise"}, args...)...)
	if err != nil {
		return fmt.Sprintf("%s(%v)", out, err)
	}
	return out
}

// Eventually calls check until it returns nil. After the limit, the test fails with its last error.
func (m *Machine) Eventually(limit time.Duration, what string, check func() error) {
	m.t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("%s: waited %s for %s: %v", m.Suite, limit, what, err)
		}
		time.Sleep(25 * time.Millisecond)
	}
}

// remove switches the machine off and removes everything of it.
func (m *Machine) remove() {
	if m.t.Failed() && m.running() && m.leader != 0 {
		m.t.Logf("%s: journal\n%s", m.Suite, m.Journal("-n", "300"))
	} else if m.t.Failed() {
		if b, err := os.ReadFile(filepath.Join(m.dir, "console")); err == nil {
			m.t.Logf("%s: console\n%s", m.Suite, b)
		}
	}
	if m.running() {
		if err := m.cut(); err != nil {
			m.t.Error(err)
		}
	}
	if m.console != nil {
		m.console.Close()
	}
	if err := m.group.remove(); err != nil {
		m.t.Error(err)
	}
	// Files that are still open disappear when the last process of the guest has ended.
	if err := syscall.Unmount(m.Disk, syscall.MNT_DETACH); err != nil && err != syscall.EINVAL {
		m.t.Error(err)
	}
	if err := os.RemoveAll(m.dir); err != nil {
		m.t.Error(err)
	}
	// Remove what nspawn leaves of a machine whose power was cut.
	for _, kind := range []string{"propagate", "unix-export"} {
		if err := os.RemoveAll(filepath.Join("/run/systemd/nspawn", kind, m.name)); err != nil {
			m.t.Error(err)
		}
	}
}
