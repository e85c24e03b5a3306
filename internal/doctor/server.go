package doctor

import (
	"context"
	"fmt"
	"strings"

	"csi-registrar/internal/safetext"
)

// server is what is known about the process that serves a driver's socket, or served it last.
type server struct {
	pid                  int    // 0: it has ended, or is not known
	unit, pod, container string // checked; empty if not known
	// how its unit ended, as the rest of a sentence; empty if it runs or is not known
	ended string
}

// serverOf returns who serves a driver's socket: the process who, or, if that is the zero
// process, the one that the daemon saw last.
func (x *diagnosis) serverOf(ctx context.Context, driver string, who process) server {
	s := server{pid: who.pid, unit: who.unit, pod: who.pod, container: who.container}
	if who.pid == 0 {
		st, _ := x.daemon.Driver(driver)
		s = server{unit: st.Server.Unit, pod: st.Server.Pod, container: st.Server.Container}
	}
	if !strings.HasSuffix(s.unit, ".service") || !safetext.UnitName(s.unit) {
		s.unit = ""
	}
	if safetext.ShellWord(s.pod) != s.pod || safetext.ShellWord(s.container) != s.container {
		s.pod, s.container = "", ""
	}
	if s.unit != "" && x.o.Units != nil {
		s.ended = x.lastExit(ctx, s.unit)
	}
	return s
}

// lastExit returns how a unit ended, in systemctl's terms, as the rest of a sentence; empty if it
// runs.
func (x *diagnosis) lastExit(ctx context.Context, unit string) string {
	p, err := x.o.Units.Show(ctx, unit, "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "ExecMainExitTimestamp", "NRestarts")
	if err != nil || p["ActiveState"] == "active" && p["SubState"] == "running" {
		return ""
	}
	text := fmt.Sprintf("; %s is %s (%s)", unit, p["ActiveState"], p["SubState"])
	how := map[string]string{"1": "exit status", "2": "signal", "3": "signal"}[p["ExecMainCode"]]
	if how != "" {
		text += fmt.Sprintf(", its last process ended with %s %s", how, p["ExecMainStatus"])
		if at := p["ExecMainExitTimestamp"]; at != "" {
			text += " at " + at
		}
	}
	if n := p["NRestarts"]; n != "" && n != "0" {
		text += ", restarted " + n + " times"
	}
	return safetext.Clean(text, maxText)
}

// log returns the commands that show the last log entries.
func (s server) log() []Fix {
	switch {
	case s.unit != "":
		return []Fix{stateOf(s.unit), logOf(s.unit)}
	case s.container != "":
		return []Fix{run("crictl", "ps", "--all", "--label", "io.kubernetes.pod.uid="+s.pod), run("crictl", "logs", "--tail", "50", s.container)}
	case s.pod != "":
		return []Fix{run("crictl", "ps", "--all", "--label", "io.kubernetes.pod.uid="+s.pod)}
	}
	return nil
}

// restart returns the commands that show the last log entries and restart it.
func (s server) restart() []Fix {
	switch {
	case s.unit != "":
		return append(s.log(), systemctl("restart", s.unit))
	case s.container != "":
		return append(s.log(), note("the kubelet restarts a container that was stopped"), run("crictl", "stop", s.container))
	case s.pod != "":
		return append(s.log(), note("delete the pod: its DaemonSet creates a new one"))
	}
	if s.pid != 0 {
		return []Fix{note("see the log of the driver, which is process %d, and restart it", s.pid)}
	}
	return []Fix{note("restart the driver: its unit or pod is not known, because it has not served the socket since the daemon started")}
}
