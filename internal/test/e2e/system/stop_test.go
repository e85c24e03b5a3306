package system

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// stopped checks that the daemon and its sockets are gone for good, and that a request to its
// socket does not start it again.
func (n *node) stopped(mark int) {
	n.t.Helper()
	n.awaitState(unit, "inactive")
	n.awaitState(socket, "inactive")
	if files := n.files(); len(files) > 0 {
		n.t.Errorf("%s: left behind: %q", n.Suite, files)
	}
	for _, name := range n.drivers {
		n.Eventually(soon, "the kubelet to deregister "+name, func() error {
			events := n.events()[mark:]
			if !slices.ContainsFunc(events, func(e event) bool { return e.Event == "deregister" && e.Driver == name }) {
				return fmt.Errorf("it saw %v", events)
			}
			return nil
		})
	}
	out, err := n.Try("csi-registrar", "status")
	exit, ok := err.(*exec.ExitError)
	if !ok || exit.ExitCode() != 3 {
		n.t.Errorf("%s: status of a stopped daemon: %v, want exit code 3\n%s", n.Suite, err, out)
	}
	n.awaitState(unit, "inactive")
}

func TestStop(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		for _, how := range [][]string{
			{"systemctl", "stop", unit},
			{"systemctl", "stop", socket}, // stops both
			{"systemctl", "disable", "--now", unit},
		} {
			mark := n.mark()
			n.Run(how...)
			n.stopped(mark)
			mark = n.mark()
			n.Run("systemctl", "start", unit)
			if _, err := n.Try("test", "-e", "/run/csi-registrar/state/stopped"); err == nil {
				t.Errorf("%s: started, and the answer to %q can still be believed", suite, how)
			}
			n.registered(mark)
		}
	})
}

// TestStopRaces checks that a stop followed at once by a restart, and the reverse, end in the state
// of the last request.
func TestStopRaces(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		for delay := range 14 {
			pause := time.Duration(delay) * 10 * time.Millisecond
			n.Run("systemctl", "--no-block", "stop", unit)
			time.Sleep(pause) // at another moment of the stop each time
			n.Run("systemctl", "restart", unit)
			n.published()
			n.Run("systemctl", "--no-block", "restart", unit)
			time.Sleep(pause)
			n.Run("systemctl", "stop", unit)
			n.awaitState(unit, "inactive")
			n.awaitState(socket, "inactive")
			n.swept(fmt.Sprintf("restart, stop after %s", pause))
			n.Run("systemctl", "start", unit)
			n.published()
		}
		n.waited()
	})
}

// TestStopInsideRestart stops the units when both are already down, and have seen a restart as
// their job.
func TestStopInsideRestart(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/etc/systemd/system/csi-registrar.socket.d/slow.conf",
			"[Socket]\nExecStopPost=+/bin/sh -c 'touch /run/told; sleep 1'\n")
		n.Boot()
		n.registered(0)
		mark := n.mark()
		n.Run("systemctl", "--no-block", "restart", unit)
		n.Eventually(soon, "both to be told", func() error {
			_, err := n.Try("test", "-e", "/run/told")
			return err
		})
		n.Run("systemctl", "stop", unit)
		n.swept("stop inside a restart")
		n.stopped(mark)
		mark = n.mark()
		n.Run("systemctl", "start", unit)
		n.registered(mark)
	})
}

// swept waits until no registration socket is left.
func (n *node) swept(after string) {
	n.t.Helper()
	n.Eventually(soon, "no registration socket after "+after, func() error {
		if files := n.files(); len(files) > 0 {
			return fmt.Errorf("left behind: %q", files)
		}
		return nil
	})
}

// published waits until the registration sockets exist.
func (n *node) published() {
	n.t.Helper()
	n.Eventually(soon, "the registration sockets", func() error {
		if inodes := n.inodes(); slices.Contains(inodesOf(n), 0) {
			return fmt.Errorf("inodes %v", inodes)
		}
		return nil
	})
}

// TestStopBetweenStarts stops the daemon when it has crashed and was not restarted yet.
func TestStopBetweenStarts(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := newNode(t, suite)
		n.Write("/etc/systemd/system/csi-registrar.service.d/restart.conf", "[Service]\nRestartSec=10s\n")
		n.Boot()
		n.registered(0)
		n.Run("systemctl", "kill", "--signal=KILL", unit)
		n.awaitState(unit, "activating")
		before, mark := n.inodes(), n.mark()
		if slices.Contains(inodesOf(n), 0) {
			t.Fatalf("crashed, and sockets are gone: %v", before)
		}
		n.Run("systemctl", "stop", unit)
		n.stopped(mark)
	})
}

func inodesOf(n *node) []uint64 {
	var all []uint64
	for _, ino := range n.inodes() {
		all = append(all, ino)
	}
	return all
}

// cleanBoot checks what the kubelet found in the registry when it started, and that it did not see
// any deregistration before.
func (n *node) cleanBoot(mark int, since time.Time) {
	n.t.Helper()
	n.registered(mark)
	events := n.events()[mark:]
	start := slices.IndexFunc(events, func(e event) bool { return e.Event == "started" })
	if start != 0 {
		n.t.Errorf("%s: the kubelet saw this when the machine went down: %v", n.Suite, events[:max(start, 0)])
	}
	for _, e := range events {
		if e.Error != "" || e.Event == "deregister" {
			n.t.Errorf("%s: after the boot the kubelet saw %v", n.Suite, e)
		}
	}
	// Sockets that were created before this boot and have no listener would be stale.
	for _, line := range strings.Split(strings.TrimSpace(n.Read("/var/log/found")), "\n") {
		name, at, found := strings.Cut(line, " ")
		if !found {
			continue
		}
		changed, err := strconv.ParseInt(at, 10, 64)
		if err != nil {
			n.t.Fatal(err)
		}
		if changed < since.Unix() {
			n.t.Errorf("%s: the kubelet found %s of %s, before this boot (%s)", n.Suite, name, time.Unix(changed, 0), since)
		}
	}
}

func TestRebootAndPoweroff(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		n.Write("/var/log/found", "")
		mark := n.mark()
		n.quiet(mark) // and the sockets are older than the boot by more than a second
		since := time.Now()
		n.Reboot()
		n.cleanBoot(mark, since)

		n.Write("/var/log/found", "")
		mark = n.mark()
		n.quiet(mark)
		n.Poweroff()
		if files := n.files(); len(files) > 0 {
			t.Errorf("left on the disk: %q", files)
		}
		since = time.Now()
		n.Boot()
		n.cleanBoot(mark, since)
	})
}

// A soft-reboot keeps /run, with the records of the sockets in it, and ends all processes.
func TestSoftReboot(t *testing.T) {
	onEach(t, func(t *testing.T, suite string) {
		if suite == "bullseye" || suite == "bookworm" {
			t.Skip("systemd older than 254 has none")
		}
		n := newNode(t, suite)
		kubelet, err := os.ReadFile(filepath.Join(kubeletDir(t), "kubelet"))
		if err != nil {
			t.Fatal(err)
		}
		// The soft-reboot unmounts /w.
		n.WriteMode("/opt/kubelet", string(kubelet), 0o755)
		n.Write("/usr/lib/systemd/system/kubelet.service", strings.ReplaceAll(kubeletUnit, "/w/kubelet", "/opt/kubelet"))
		n.Boot()
		n.registered(0)
		n.Write("/var/log/found", "")
		mark := n.mark()
		n.quiet(mark) // and the sockets are older than the boot by more than a second
		since := time.Now()
		n.SoftReboot()
		n.cleanBoot(mark, since)
	})
}

func TestPowerCut(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		n.Write("/var/log/found", "")
		mark := n.mark()
		n.quiet(mark)
		n.PowerCut()
		if slices.Contains(inodesOf(n), 0) {
			t.Fatalf("no stale sockets on the disk (%v), so this shows nothing", n.inodes())
		}
		since := time.Now()
		n.Boot()
		n.cleanBoot(mark, since)
	})
}
