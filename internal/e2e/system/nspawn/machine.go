// Package nspawn boots a real systemd as PID 1 in a container, for tests: it can be
// rebooted, switched off, and have its power cut, and what it wrote to its disk stays.
package nspawn

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/e2e/child"
)

// Limits of what should take a second, generous for machines under load.
const (
	bootLimit = 60 * time.Second
	runLimit  = 60 * time.Second
)

// Machine is one container: a disk of its own over the root of a suite. It is not for use
// by several goroutines, except Try and Path.
type Machine struct {
	Suite string
	// Disk is the machine's disk on the host.
	Disk string
	// Args are further arguments for systemd-nspawn.
	Args []string
	// Network is the path of the network namespace; "" gives the machine an empty one at each boot.
	Network string

	t       testing.TB
	name    string
	dir     string
	group   cgroup
	nspawn  *exec.Cmd
	ended   <-chan struct{} // closed when nspawn was waited for
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

// NewFromImage prepares a machine from two partitions of an image: a copy of the root file
// system, and /usr itself. systemd-nspawn --image= would need udev.
func NewFromImage(t testing.TB, name, root, usr string) *Machine {
	t.Helper()
	m := prepare(t, name)
	// No option says read-only: whether /usr can be written to is up to the image.
	script := `cp --sparse=always "$2" "$1/root" && mount -o loop "$1/root" "$1/disk" && mount -o loop "$3" "$1/disk/usr"`
	if out, err := exec.Command("sh", "-c", script, "sh", m.dir, root, usr).CombinedOutput(); err != nil {
		t.Fatalf("cannot mount the partitions: %v\n%s", err, out)
	}
	return m
}

// prepare makes what every machine has, but for what is on its disk.
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

// During has failures count for another test, a part of the machine's own, until do returns.
func (m *Machine) During(t testing.TB, do func()) {
	outer := m.t
	m.t = t
	defer func() { m.t = outer }()
	do()
}

// Write writes a file on the disk, on or off.
func (m *Machine) Write(path, content string) {
	m.t.Helper()
	m.WriteMode(path, content, 0o644)
}

// WriteMode writes a file with a mode, whatever the umask.
func (m *Machine) WriteMode(path, content string, mode os.FileMode) {
	m.t.Helper()
	full := m.Path(path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(content), mode); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Chmod(full, mode); err != nil {
		m.t.Fatal(err)
	}
}

// Read reads a file on the disk; "" if there is none.
func (m *Machine) Read(path string) string {
	m.t.Helper()
	b, err := os.ReadFile(m.Path(path))
	if err != nil && !os.IsNotExist(err) {
		m.t.Fatal(err)
	}
	return string(b)
}

// Chroot runs a command on the disk of a machine that is off.
func (m *Machine) Chroot(args ...string) string {
	m.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Path = lookIn(m.Disk, args[0])
	cmd.Err = nil
	cmd.Dir = "/"
	cmd.Env = environment
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: m.Disk}
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s: %q in the chroot: %v\n%s", m.Suite, args, err, out)
	}
	return string(out)
}

var environment = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root", "SYSTEMD_PAGER=", "TERM=dumb"}

func lookIn(root, name string) string {
	for _, dir := range []string{"/usr/bin", "/usr/sbin", "/bin", "/sbin"} {
		if _, err := os.Stat(filepath.Join(root, dir, name)); err == nil {
			return filepath.Join(dir, name)
		}
	}
	return name
}

// Boot switches the machine on and returns when all that boot starts has been started.
func (m *Machine) Boot() {
	m.t.Helper()
	m.SwitchOn()
	m.booted()
}

// SwitchOn switches the machine on and returns when PID 1 runs.
func (m *Machine) SwitchOn() {
	m.t.Helper()
	network := "--private-network"
	if m.Network != "" {
		network = "--network-namespace-path=" + m.Network
	}
	// Remains of the previous boot would be mistaken for this one's.
	if err := m.group.clear(); err != nil {
		m.t.Fatal(err)
	}
	args := append([]string{
		"--quiet", "--register=no", "--keep-unit", "--boot", "--directory=" + m.Disk, "--machine=" + m.name,
		network, "--console=pipe", "--settings=no", "--link-journal=no", "--resolv-conf=off", "--timezone=off",
		"--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self",
	}, m.Args...)
	m.nspawn = exec.Command("/bin/sh", append([]string{"-c", m.group.enter() + `exec systemd-nspawn "$@"`, "sh"}, args...)...)
	m.nspawn.Env = append(os.Environ(), "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1")
	m.nspawn.Stdout, m.nspawn.Stderr = m.console, m.console
	ended, err := child.Start(m.nspawn, syscall.SIGTERM)
	if err != nil {
		m.t.Fatal(err)
	}
	m.ended = ended
	m.findLeader()
}

// findLeader waits until nspawn has a PID 1.
func (m *Machine) findLeader() {
	m.t.Helper()
	pid := m.nspawn.Process.Pid
	m.Eventually(bootLimit, "PID 1 of "+m.name, func() error {
		select {
		case <-m.ended:
			return fmt.Errorf("systemd-nspawn ended")
		default:
		}
		for _, child := range children(pid) {
			comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child))
			if err == nil && strings.TrimSpace(string(comm)) == "systemd" {
				m.leader = child
				return nil
			}
		}
		return fmt.Errorf("none yet")
	})
}

func children(pid int) []int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return nil
	}
	var all []int
	for _, field := range strings.Fields(string(b)) {
		if n, err := strconv.Atoi(field); err == nil {
			all = append(all, n)
		}
	}
	return all
}

func (m *Machine) booted() {
	m.t.Helper()
	m.Eventually(bootLimit, "the end of the boot", func() error {
		out, err := m.Try("systemctl", "is-system-running", "--wait")
		switch strings.TrimSpace(out) {
		case "running", "degraded":
			return nil
		}
		return fmt.Errorf("%q, %w", out, err)
	})
}

// Try runs a command in the machine and returns its output, both streams.
func (m *Machine) Try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
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

// Start starts a command in the machine; the caller waits for it.
func (m *Machine) Start(args ...string) *exec.Cmd {
	m.t.Helper()
	cmd := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(m.leader), "-a", "--"}, args...)...)
	cmd.Env = environment
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	return cmd
}

// Signal sends a signal to PID 1.
func (m *Machine) Signal(sig syscall.Signal) {
	m.t.Helper()
	if err := syscall.Kill(m.leader, sig); err != nil {
		m.t.Fatal(err)
	}
}

// Path is a path inside the machine as the host sees it: with all that is mounted while it
// runs, on its disk while it does not.
func (m *Machine) Path(path string) string {
	if m.leader == 0 {
		return filepath.Join(m.Disk, path)
	}
	return fmt.Sprintf("/proc/%d/root%s", m.leader, path)
}

// PowerCut ends everything in the machine at once.
func (m *Machine) PowerCut() {
	m.t.Helper()
	if err := m.cut(); err != nil {
		m.t.Fatal(err)
	}
}

// cut kills everything at once, including nspawn, so that nothing is cleaned up. It returns when
// all processes have ended. If PID 1 were killed first, others would still log that it does not
// answer.
func (m *Machine) cut() error {
	m.leader = 0
	if err := m.group.kill(); err != nil {
		return err
	}
	// If it had not entered the group yet.
	if err := m.nspawn.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-m.ended
	for range 500 {
		if m.group.empty() {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("processes of %s live on", m.name)
}

// Poweroff shuts the machine down in order.
func (m *Machine) Poweroff() {
	m.t.Helper()
	m.shutDown("poweroff")
}

// Reboot reboots the machine in order and returns when it is up again.
func (m *Machine) Reboot() {
	m.t.Helper()
	m.shutDown("reboot") // with --keep-unit, nspawn ends and leaves the rest to its caller
	m.Boot()
}

// SoftReboot ends all processes but PID 1, which boots again without the kernel (systemd 254), and
// returns when the machine is up.
func (m *Machine) SoftReboot() {
	m.t.Helper()
	// PID 1 never answers a request that arrives just when it starts again.
	count := []string{"timeout", "5", "systemctl", "show", "--value", "--property=SoftRebootsCount"}
	before := m.Run(count...)
	_, _ = m.Try("timeout", "5", "systemctl", "soft-reboot") // may lose its connection on the way
	m.Eventually(bootLimit, "the soft-reboot", func() error {
		after, err := m.Try(count...)
		if err == nil && after == before {
			return errors.New("not yet")
		}
		return err
	})
	m.booted()
}

func (m *Machine) shutDown(how string) {
	m.t.Helper()
	_, _ = m.Try("systemctl", how) // may lose its connection on the way
	select {
	case <-m.ended:
	case <-time.After(runLimit):
		m.t.Fatalf("%s: no end of the %s", m.name, how)
	}
	m.leader = 0
}

// Journal returns what the machine logged since it was booted.
func (m *Machine) Journal(args ...string) string {
	out, err := m.Try(append([]string{"journalctl", "--no-pager", "--quiet", "--output=short-precise"}, args...)...)
	if err != nil {
		return fmt.Sprintf("%s(%v)", out, err)
	}
	return out
}

// Eventually tries until check finds nothing wrong, and fails the test with the last
// thing that it found.
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

// On reports whether the machine has a PID 1.
func (m *Machine) On() bool { return m.leader != 0 && m.running() }

func (m *Machine) running() bool {
	if m.ended == nil {
		return false
	}
	select {
	case <-m.ended:
		return false
	default:
		return true
	}
}

// remove switches the machine off and takes everything of it away.
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
