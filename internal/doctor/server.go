package doctor

import (
	"context"
	"fmt"
	"strings"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// server is what is known of the process that serves a driver's socket, or served it last.
type server struct {
	pid                  int    // 0: it has ended, or is not known
	unit, pod, container string // checked; empty if not known
	ended                string // how its unit ended; empty if it runs or is not known
}

// serverOf returns who serves a driver's socket: the process who, or, if that is the zero
// process, the one that the daemon saw last.
func (x *diagnosis) serverOf(ctx context.Context, driver string, who process) server {
	s := server{pid: who.pid, unit: who.unit, pod: who.pod, container: who.container}
	if who.pid == 0 {
		last := x.lastServer(driver)
		s = server{unit: last.Unit, pod: last.Pod, container: last.Container}
	}
	s = checkedServer(s)
	if s.unit != "" && x.o.Units != nil {
		s.ended = x.lastExit(ctx, s.unit)
	}
	return s
}

// checkedServer leaves out what is no name of a unit, a pod or a container.
func checkedServer(s server) server {
	if !strings.HasSuffix(s.unit, ".service") || !safetext.UnitName(s.unit) {
		s.unit = ""
	}
	if safetext.ShellWord(s.pod) != s.pod || safetext.ShellWord(s.container) != s.container {
		s.pod, s.container = "", ""
	}
	return s
}

// lastServer returns what the daemon remembers of the process that served a driver's socket.
func (x *diagnosis) lastServer(driver string) status.Server {
	st, _ := x.daemon.Driver(driver)
	return st.Server
}

// lastExit says how a unit ended, in the words of systemctl; empty if it runs.
func (x *diagnosis) lastExit(ctx context.Context, unit string) string {
	p, err := x.o.Units.Show(ctx, unit, "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "ExecMainExitTimestamp", "NRestarts")
	if err != nil || p["ActiveState"] == "active" && p["SubState"] == "running" {
		return ""
	}
	text := fmt.Sprintf("%s is %s (%s)", unit, p["ActiveState"], p["SubState"])
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

// end says how its unit ended, as the rest of a sentence; empty if that is not known.
func (s server) end() string {
	if s.ended == "" {
		return ""
	}
	return "; " + s.ended
}

// log shows what it said last.
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

// restart shows what it said last, and restarts it.
func (s server) restart() []Fix {
	switch {
	case s.unit != "":
		return append(s.log(), systemctl("restart", s.unit))
	case s.container != "":
		return append(s.log(), note("the kubelet starts a container again that was stopped"), run("crictl", "stop", s.container))
	case s.pod != "":
		return append(s.log(), note("delete the pod, its DaemonSet makes a new one"))
	}
	if s.pid != 0 {
		return []Fix{note("look into the log of the driver, which is process %d, and restart it", s.pid)}
	}
	return []Fix{note("restart the driver: its unit or pod is not known, because it has not served the socket since the daemon started")}
}
