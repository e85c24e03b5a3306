package nspawn

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/test/e2e/child"
)

// Boot switches the machine on and waits until the boot is complete.
func (m *Machine) Boot() {
	m.t.Helper()
	m.SwitchOn()
	m.booted()
}

// SwitchOn switches the machine on and waits until PID 1 runs.
func (m *Machine) SwitchOn() {
	m.t.Helper()
	network := "--private-network"
	if m.Network != "" {
		network = "--network-namespace-path=" + m.Network
	}
	// Remains of the previous boot would be mistaken for groups of this boot.
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
	// nspawn may not have entered the group yet.
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

// Poweroff shuts the machine down.
func (m *Machine) Poweroff() {
	m.t.Helper()
	m.shutDown("poweroff")
}

// Reboot reboots the machine and waits until the boot is complete.
func (m *Machine) Reboot() {
	m.t.Helper()
	m.shutDown("reboot") // with --keep-unit, nspawn ends instead of rebooting
	m.Boot()
}

// SoftReboot restarts userspace without the kernel (systemd 254) and waits until the boot is
// complete.
func (m *Machine) SoftReboot() {
	m.t.Helper()
	// PID 1 does not answer a request that arrives just when it executes itself again.
	count := []string{"timeout", "5", "systemctl", "show", "--value", "--property=SoftRebootsCount"}
	before := m.Run(count...)
	// It may lose its connection on the way.
	_, _ = m.tryFor(downLimit, "timeout", "5", "systemctl", "soft-reboot")
	m.Eventually(bootLimit, "the soft-reboot", func() error {
		after, err := m.tryFor(downLimit, count...)
		if err == nil && after == before {
			return errors.New("not yet")
		}
		return err
	})
	m.booted()
}

func (m *Machine) shutDown(how string) {
	m.t.Helper()
	_, _ = m.tryFor(downLimit, "systemctl", how) // may lose its connection on the way
	select {
	case <-m.ended:
	case <-time.After(runLimit):
		m.t.Fatalf("%s: no end of the %s", m.name, how)
	}
	m.leader = 0
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
