package system

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
	"csi-registrar/internal/test/hostile"
)

// TestHostileDaemon runs the commands of root on a booted node beside a program that answers at the
// control socket from inside the daemon's unit: they touch no file, start no process and no unit
// that it names, and write nothing that a terminal would interpret.
func TestHostileDaemon(t *testing.T) {
	program, err := os.ReadFile(built.Command(t, "sandbox"))
	if err != nil {
		t.Fatal(err)
	}
	onSuites(t, func(t *testing.T, suite string) {
		const bait = "/srv/bait"
		n := &node{Machine: nspawn.New(t, suite), t: t}
		install(t, n.Machine)
		n.WriteMode("/usr/local/bin/sandbox", string(program), 0o755)
		n.Write("/usr/lib/systemd/system/csi-sample@.service", driverUnit)
		n.Write("/etc/csi-registrar/conf.d/20-a.toml", driverConfig(hostile.Driver))
		n.Write("/etc/systemd/system/"+hostile.Unit, "[Unit]\nDescription="+hostile.Secret+"\n[Service]\nEnvironment=X="+hostile.Secret+
			"\nExecStart=/bin/sh -c 'echo "+hostile.Secret+"; exec sleep infinity'\n")
		n.Boot()
		n.Run("systemctl", "start", hostile.Unit, "csi-sample@"+hostile.Driver+".service")
		victim := n.show(hostile.Unit, "MainPID")
		n.Write("/etc/systemd/system/csi-registrar.service.d/hostile.conf",
			fmt.Sprintf("[Service]\nType=exec\nWatchdogSec=0\nExecStart=\nExecStart=/usr/local/bin/sandbox answer %s %s\n", bait, victim))
		n.Run("systemctl", "daemon-reload")
		n.Run("systemctl", "start", unit)
		installedJobs := func() string { return n.Run("systemctl", "show", "-P", "NInstalledJobs") }
		jobs := installedJobs()

		args := []string{"sh", "-c", `"$@" >/root/asked 2>&1`, "sh", "/usr/local/bin/sandbox", "ask", bait}
		if os.Getenv("LONG") == "yes" {
			args = append(args, "all")
		}
		failed := n.Start(args...).Wait()
		harm := strings.Split(strings.TrimSpace(n.Read("/root/asked")), "\n")
		last := len(harm) - 1
		for _, line := range harm[:last] {
			t.Error(line)
		}
		if failed != nil || !strings.Contains(harm[last], " journalctl:") {
			t.Errorf("%v: %s", failed, harm[last])
		}
		t.Log(harm[last])
		if got := installedJobs(); got != jobs {
			t.Errorf("systemd had %s jobs before, and %s after", jobs, got)
		}
		if got := n.show(hostile.Unit, "MainPID"); got != victim {
			t.Errorf("the process that was named ended: %s", got)
		}
	}, main, "trixie")
}

// TestForgedJournal has a program of root, as the daemon is, log an error as if it were about the
// kubelet's unit: doctor does not believe that the kubelet said so.
func TestForgedJournal(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		const forged = `E1128 01:02:03.000004 1 kubelet_node_status.go:1] "Error" err="node is not allowed to modify node /srv/bait"`
		n.Run("sh", "-c", `printf '%s\n' "$@" | logger --journald; journalctl --sync`, "sh", "MESSAGE="+forged, "OBJECT_PID="+n.show("kubelet.service", "MainPID"))
		if seen := n.Journal("--unit=kubelet.service"); !strings.Contains(seen, "/srv/bait") {
			t.Fatalf("journalctl does not show what was forged: %s", seen)
		}
		if out, err := n.Try("csi-registrar", "doctor"); err != nil || strings.Contains(out, "/srv/bait") {
			t.Errorf("%v: %s", err, out)
		}
	})
}
