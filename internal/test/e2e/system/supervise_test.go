package system

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The four lines of the examples, for the first sample driver.
const superviseDropIn = `[Service]
NotifyAccess=all
WatchdogSec=5s
ExecStartPre=-/bin/rm -f /run/csi-one.sample.csi/csi.sock
ExecStartPost=/usr/bin/csi-registrar supervise --socket /run/csi-one.sample.csi/csi.sock --watchdog 5s
TimeoutStartSec=30s
Restart=always
RestartSec=100ms
`

const (
	supervised = "csi-sample@one.sample.csi.service"
	watchdog   = 5 * time.Second
)

// supervisedNode returns a node whose first driver is supervised and begins to serve after a delay.
func supervisedNode(t *testing.T, suite, delay string) *node {
	n := newNode(t, suite)
	n.Write("/etc/systemd/system/"+supervised+".d/supervise.conf", superviseDropIn+
		"ExecStart=\nExecStart=/bin/sh -c 'sleep "+delay+`; exec /usr/bin/csi-sample-driver `+
		"--socket /run/csi-one.sample.csi/csi.sock --name one.sample.csi --node-id node-1 --data /run/csi-one.sample.csi/volumes'\n")
	return n
}

// processes returns the processes of the unit's control group, command lines by PID.
func (n *node) processes(unit string) map[string]string {
	n.t.Helper()
	group := n.show(unit, "ControlGroup")
	out, err := n.Try("sh", "-c", `for f in /sys/fs/cgroup/"$0"/cgroup.procs /sys/fs/cgroup/systemd/"$0"/cgroup.procs; do
		[ ! -e "$f" ] || while read p; do echo "$p $(tr '\0' ' ' </proc/$p/cmdline)"; done <"$f"; done`, group)
	if err != nil {
		n.t.Fatalf("%v: %s", err, out)
	}
	all := map[string]string{}
	for line := range strings.Lines(out) {
		if pid, command, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			all[pid] = command
		}
	}
	return all
}

// feeder returns the PID of the process that feeds the watchdog.
func (n *node) feeder() (pid string) {
	n.t.Helper()
	n.Eventually(soon, "the process that feeds the watchdog", func() error {
		all := n.processes(supervised)
		for p, command := range all {
			if strings.Contains(command, "supervise --keep") {
				pid = p
				return nil
			}
		}
		return fmt.Errorf("there are %v", all)
	})
	return pid
}

// restartedWithin waits until a new process of the driver serves, and returns how long that took.
func (n *node) restartedWithin(before string, limit time.Duration) time.Duration {
	n.t.Helper()
	begun := time.Now()
	n.Eventually(limit, "another process of the driver", func() error {
		if now := n.show(supervised, "MainPID"); now == before || now == "0" {
			return fmt.Errorf("its process is %s", now)
		}
		return nil
	})
	took := time.Since(begun)
	n.awaitState(supervised, "active")
	return took
}

// TestSupervise checks that the unit is only active when its driver serves, and that the watchdog
// restarts a driver that hangs, or whose feeding process was killed. No processes are left.
func TestSupervise(t *testing.T) {
	rounds := superviseRounds(t)
	onMain(t, func(t *testing.T, suite string) {
		n := supervisedNode(t, suite, "1.5")
		n.Boot()
		n.registered(0)
		mark := n.mark()

		begun := time.Now()
		n.Run("systemctl", "restart", supervised)
		if took := time.Since(begun); took < 1500*time.Millisecond {
			t.Errorf("%s: active after %s, before the driver served", suite, took)
		} else {
			t.Logf("%s: active %s after its start, of which the driver slept 1.5 s", suite, took)
		}
		n.Eventually(time.Minute, "the unit's status", func() error {
			if text := n.show(supervised, "StatusText"); text != "the driver serves" && text != "one.sample.csi serves" {
				return fmt.Errorf("it is %q", text)
			}
			return nil
		})

		for range rounds {
			pid := n.show(supervised, "MainPID")
			n.feeder()
			n.Run("sh", "-c", "kill -STOP "+pid)
			// The driver itself sleeps for 1.5 s.
			t.Logf("%s: restarted %s after SIGSTOP", suite, n.restartedWithin(pid, soon))
		}
		// SIGABRT made the driver log its stacks.
		if out := n.Journal("-u", supervised, "-t", "csi-registrar"); !strings.Contains(out, "does not serve") || strings.Contains(out, "goroutine ") {
			t.Errorf("%s: the journal should have the hang, and no stacks of the process that feeds the watchdog:\n%s", suite, out)
		}

		// Without the process that feeds the watchdog the driver is restarted once.
		restarts, pid, feeder := n.show(supervised, "NRestarts"), n.show(supervised, "MainPID"), n.feeder()
		n.Run("sh", "-c", "kill -KILL "+feeder)
		t.Logf("%s: restarted %s after the end of the process that feeds the watchdog", suite, n.restartedWithin(pid, soon))
		if again := n.feeder(); again == feeder {
			t.Errorf("%s: it is the same process %s", suite, again)
		}
		time.Sleep(2 * watchdog) // wait, to see that nothing happens
		if was, _ := strconv.Atoi(restarts); n.show(supervised, "NRestarts") != strconv.Itoa(was+1) {
			t.Errorf("%s: %s restarts, were %s before", suite, n.show(supervised, "NRestarts"), restarts)
		}

		group := n.processes(supervised)
		n.Run("systemctl", "stop", supervised)
		for pid, command := range group {
			if out, err := n.Try("test", "-e", "/proc/"+pid); err == nil {
				t.Errorf("%s: %s is left after the stop (%s) %s", suite, pid, command, out)
			}
		}
		n.Run("systemctl", "start", supervised)
		n.waited()
		n.quiet(mark)
	})
}

// superviseRounds is how often a driver hangs: SUPERVISE_ROUNDS, or 2.
func superviseRounds(t *testing.T) int {
	t.Helper()
	s := os.Getenv("SUPERVISE_ROUNDS")
	if s == "" {
		return 2
	}
	rounds, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return rounds
}

// TestSuperviseHangAtStart checks that the start of a driver that never answers fails after
// TimeoutStartSec=, not before, and that one that ends is reported at once.
func TestSuperviseHangAtStart(t *testing.T) {
	t.Parallel()
	n := supervisedNode(t, "trixie", "infinity")
	n.Write("/etc/systemd/system/"+supervised+".d/zz.conf", "[Service]\nTimeoutStartSec=12s\nRestart=no\n")
	n.Chroot("systemctl", "disable", supervised)
	n.Boot()
	begun := time.Now()
	out, err := n.Try("systemctl", "start", supervised)
	if took := time.Since(begun); err == nil || took < 10*time.Second {
		t.Errorf("started after %s (%v): %s", took, err, out)
	}
	n.Write("/etc/systemd/system/"+supervised+".d/zz.conf", "[Service]\nExecStart=\nExecStart=/bin/sh -c 'sleep 1; exit 1'\nRestart=no\n")
	n.Run("systemctl", "daemon-reload")
	if out, err := n.Try("systemctl", "start", supervised); err == nil {
		t.Errorf("a driver that ended started: %s", out)
	}
}

// TestSuperviseExamples checks that, with the units of the examples, drivers that hang are
// restarted and their mounts stay. UPSTREAM_DRIVERS is a directory with upstream's programs, which
// replace ours on all suites.
func TestSuperviseExamples(t *testing.T) {
	upstream := os.Getenv("UPSTREAM_DRIVERS")
	if upstream == "" {
		t.Parallel()
		superviseExamples(t, "trixie", "", 1)
		return
	}
	onMain(t, func(t *testing.T, suite string) { superviseExamples(t, suite, upstream, superviseRounds(t)) })
}

func superviseExamples(t *testing.T, suite, upstream string, rounds int) {
	n := exampleNode(t, suite)
	n.drivers = []string{"nfs.csi.k8s.io", "hostpath.csi.k8s.io"}
	n.Chroot("rm", "/etc/csi-registrar/conf.d/60-smb.toml")
	n.nativeUnits()
	for _, name := range []string{"nfs", "hostpath"} {
		if upstream != "" {
			program, err := os.ReadFile(upstream + "/" + name + "plugin")
			if err != nil {
				t.Fatal(err)
			}
			n.WriteMode("/usr/local/bin/"+name+"plugin", string(program), 0o755)
		}
		_, text := example(t, name, "*.service")
		post := regexp.MustCompile(`(?m)^ExecStartPost=.*$`).FindString(text)
		n.Write("/etc/systemd/system/csi-"+name+".service.d/soon.conf", "[Service]\nWatchdogSec=5s\nExecStartPost=\n"+
			strings.Replace(post, "--watchdog 60s", "--watchdog 5s", 1)+"\n")
		n.Chroot("systemctl", "enable", "csi-"+name+".service")
	}
	n.Boot()
	n.registered(0)
	mark := n.mark()
	_, pod := n.publish("hostpath")
	target := pod + "/mount"
	slowest := time.Duration(0)
	for range rounds {
		for _, name := range []string{"nfs", "hostpath"} {
			unit := "csi-" + name + ".service"
			n.awaitState(unit, "active")
			pid := n.show(unit, "MainPID")
			n.Run("sh", "-c", "kill -STOP "+pid)
			begun := time.Now()
			n.Eventually(soon, unit+" to be restarted", func() error {
				if now := n.show(unit, "MainPID"); now == pid || now == "0" {
					return fmt.Errorf("its process is %s", now)
				}
				return nil
			})
			slowest = max(slowest, time.Since(begun))
			n.awaitState(unit, "active")
		}
	}
	t.Logf("%s: %d hangs, restarted after %s at most", suite, 2*rounds, slowest)
	if mounts := n.Run("cat", "/proc/1/mountinfo"); !strings.Contains(mounts, " "+target+" ") {
		t.Errorf("%s: what the driver had mounted at %s is gone:\n%s", suite, target, mounts)
	}
	n.waited()
	n.quiet(mark)
}
