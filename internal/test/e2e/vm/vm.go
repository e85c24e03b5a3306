// Package vm boots Debian in a virtual machine, for tests that a container cannot run: with a
// kernel of its own, and a power cut that loses data that was not written to the disk.
package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/child"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// Without hardware virtualization a boot takes a minute, and on a busy machine several.
const (
	bootLimit = 10 * time.Minute
	runLimit  = 15 * time.Minute
	size      = "4G"
)

// HostAddress is the loopback address of the machine's network namespace, as the machine sees it.
const HostAddress = "10.0.2.2"

// networkUnit configures the network in place of udev and a network manager.
const networkUnit = `[Unit]
DefaultDependencies=no
Before=network.target
Wants=network.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/sbin/modprobe virtio_net
ExecStart=/bin/busybox ip address add 10.0.2.15/24 dev eth0
ExecStart=/bin/busybox ip link set eth0 up
ExecStart=/bin/busybox ip route add default via ` + HostAddress + `
`

// Machine is a virtual machine with one disk. It is not for use by several goroutines.
type Machine struct {
	// Append is added to the kernel's command line.
	Append string
	// Network is the path of a network namespace, whose 127.0.0.1 the machine reaches as
	// HostAddress through its one interface; "" gives it none.
	Network string

	t      testing.TB
	dir    string
	kernel string
	qemu   *exec.Cmd
	ended  <-chan struct{} // closed when qemu has ended
	shell  net.Conn
	lines  *bufio.Reader
	calls  int
}

// needless are units that take half the time of an emulated boot, and look for missing devices.
var needless = []string{
	"systemd-udev-trigger.service", "systemd-udevd.service", "systemd-udevd-kernel.socket", "systemd-udevd-control.socket",
	"modprobe@configfs.service", "modprobe@drm.service", "modprobe@efi_pstore.service", "modprobe@fuse.service",
	"systemd-modules-load.service", "kmod-static-nodes.service", "systemd-udev-load-credentials.service",
	"serial-getty@ttyS0.service", "getty@tty1.service", // without udev their devices never appear
}

// New makes a machine with Debian 13 and what prepare adds to its disk. The machine is off at
// first. It is switched off and removed when the test ends.
func New(t testing.TB, prepare func(disk *nspawn.Machine)) *Machine {
	t.Helper()
	root := nspawn.Root(t, "trixie-vm") // skips without root on Debian
	for _, tool := range []string{"qemu-system-x86_64", "mke2fs"} {
		if _, err := exec.LookPath(tool); err != nil {
			nspawn.Need(t, tool+" is not here (Debian: qemu-system-x86, e2fsprogs)")
		}
	}
	kernels, err := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
	if err != nil || len(kernels) != 1 {
		t.Fatalf("kernels %q, %v", kernels, err)
	}
	dir, err := os.MkdirTemp("", "vm")
	if err != nil {
		t.Fatal(err)
	}
	m := &Machine{t: t, dir: dir, kernel: kernels[0]}
	t.Cleanup(m.remove)

	disk := nspawn.New(t, "trixie-vm")
	disk.Write("/etc/hostname", "node\n")
	disk.Write("/etc/hosts", "127.0.0.1 localhost node\n")
	disk.Write("/opt/shell", shell)
	disk.Write("/usr/lib/systemd/system/test-shell.service", shellUnit)
	disk.Write("/etc/systemd/system.conf.d/slow.conf", "[Manager]\nDefaultTimeoutStartSec=10min\nDefaultDeviceTimeoutSec=10min\nStatusUnitFormat=name\n")
	disk.Write("/etc/systemd/journald.conf.d/test.conf", "[Journal]\nStorage=persistent\nSyncIntervalSec=1s\n")
	disk.Write("/usr/lib/systemd/system/test-network.service", networkUnit)
	disk.Chroot("systemctl", "add-wants", "sysinit.target", "test-shell.service")
	prepare(disk)
	out, err := exec.Command("mke2fs", "-q", "-t", "ext4", "-d", disk.Disk, m.path("disk"), size).CombinedOutput()
	if err != nil {
		t.Fatalf("mke2fs: %v\n%s", err, out)
	}
	return m
}

func (m *Machine) path(name string) string { return filepath.Join(m.dir, name) }

// hasKVM reports whether KVM works here, which /dev/kvm alone does not show.
func hasKVM() bool {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return false
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	flags := strings.Fields(string(info))
	return err == nil && (slices.Contains(flags, "vmx") || slices.Contains(flags, "svm"))
}

// Boot switches the machine on and waits until the boot is complete.
func (m *Machine) Boot() {
	m.t.Helper()
	m.SwitchOn()
	m.Eventually(bootLimit, "the end of the boot", func() error {
		switch out, _ := m.Try("systemctl is-system-running"); strings.TrimSpace(out) {
		case "running", "degraded":
			return nil
		default:
			return fmt.Errorf("%q", out)
		}
	})
}

// SwitchOn switches the machine on and waits until it can run commands.
func (m *Machine) SwitchOn() {
	m.t.Helper()
	accel := []string{"-accel", "tcg,thread=multi", "-cpu", "Nehalem,-cx16"}
	if hasKVM() {
		accel = []string{"-accel", "kvm", "-cpu", "host"}
	}
	ln, err := net.Listen("unix", m.path("serial"))
	if err != nil {
		m.t.Fatal(err)
	}
	defer ln.Close()
	console := m.path("console-" + strconv.Itoa(m.boots()))
	// Data that the guest has written stays in the host's memory when qemu is killed; data that is
	// only in the guest's memory is lost. So cache=unsafe does not change the effect of a power
	// cut.
	kernelArgs := "root=/dev/nvme0n1 rw console=ttyS0 loglevel=4 systemd.condition_needs_update=0 systemd.mask=" +
		strings.Join(needless, " systemd.mask=") + " " + m.Append
	if m.Network != "" {
		kernelArgs += " systemd.wants=test-network.service"
	}
	args := append(accel, "-smp", "2", "-m", "3G",
		"-nodefaults", "-no-reboot", "-display", "none", "-kernel", m.kernel,
		"-append", kernelArgs,
		"-drive", "file="+m.path("disk")+",format=raw,if=none,id=disk,cache=unsafe", "-device", "nvme,drive=disk,serial=1",
		"-serial", "file:"+console, "-serial", "unix:"+m.path("serial"))
	m.qemu = exec.Command("qemu-system-x86_64", args...)
	if m.Network != "" {
		m.qemu = exec.Command("nsenter", append(append([]string{"--net=" + m.Network, "--", "qemu-system-x86_64"}, args...),
			"-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")...)
	}
	var stderr strings.Builder
	m.qemu.Stderr = &stderr
	if m.ended, err = child.Start(m.qemu, syscall.SIGKILL); err != nil {
		m.t.Fatal(err)
	}
	if err := ln.(*net.UnixListener).SetDeadline(time.Now().Add(time.Minute)); err != nil {
		m.t.Fatal(err)
	}
	if m.shell, err = ln.Accept(); err != nil {
		m.t.Fatalf("qemu does not connect: %v\n%s", err, stderr.String())
	}
	m.lines = bufio.NewReader(m.shell)
	m.must(m.shell.SetReadDeadline(time.Now().Add(bootLimit)))
	for {
		line, err := m.lines.ReadString('\n')
		if err != nil {
			m.t.Fatalf("the machine does not boot: %v", err)
		}
		if strings.TrimSpace(line) == "ready" {
			return
		}
	}
}

func (m *Machine) boots() int {
	logs, _ := filepath.Glob(m.path("console-*"))
	return len(logs)
}

// PowerCut ends the machine at once. Data that is only in its memory is lost.
func (m *Machine) PowerCut() {
	m.t.Helper()
	m.must(m.kill())
}

func (m *Machine) kill() error {
	err := m.qemu.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-m.ended
	m.qemu = nil
	return errors.Join(err, m.shell.Close())
}

// Poweroff shuts the machine down.
func (m *Machine) Poweroff() {
	m.t.Helper()
	m.must(m.send("systemctl poweroff"))
	ctx, cancel := context.WithTimeout(m.t.Context(), runLimit)
	defer cancel()
	select {
	case <-m.ended:
	case <-ctx.Done():
		m.t.Fatal("no end of the poweroff")
	}
	m.must(m.kill())
}

// Eventually calls check until it returns nil. After the limit, the test fails with its last error.
func (m *Machine) Eventually(limit time.Duration, what string, check func() error) {
	m.t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(500 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("waited %s for %s: %v", limit, what, err)
		}
	}
}

func (m *Machine) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *Machine) remove() {
	if m.qemu != nil {
		if m.t.Failed() && m.shell != nil {
			out, err := m.Try("journalctl --no-pager -b -n 200; systemctl --failed --no-pager")
			m.t.Logf("journal (%v):\n%s", err, out)
		}
		if m.shell == nil {
			_ = m.qemu.Process.Kill()
			<-m.ended
		} else if err := m.kill(); err != nil {
			m.t.Error(err)
		}
	}
	if m.t.Failed() {
		if b, err := os.ReadFile(m.path(fmt.Sprintf("console-%d", m.boots()-1))); err == nil {
			m.t.Logf("console of the last boot:\n%s", b[max(0, len(b)-8000):])
		}
	}
	if err := os.RemoveAll(m.dir); err != nil {
		m.t.Error(err)
	}
}
