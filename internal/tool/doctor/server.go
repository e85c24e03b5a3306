package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"csi-registrar/internal/sys/safetext"
)

// server is what is known about the process that serves a driver's socket, or served it last.
type server struct {
	pid                  int    // 0: it has ended, or is not known
	unit, pod, container string // checked; empty if not known
	// how its unit ended, as the rest of a sentence; empty if it runs or is not known
	ended string
	named bool // the daemon did not see it; the file of unit names the socket
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
	if s == (server{}) {
		s.unit = x.unitNaming(ctx, driver)
		s.named = s.unit != ""
	}
	if s.unit != "" {
		s.ended = x.lastExit(ctx, s.unit)
	}
	return s
}

// unitDirs are the directories of unit files, except those for units that systemd's commands create
// at run time.
var unitDirs = []string{"etc/systemd/system", "run/systemd/system", "run/systemd/generator", "usr/local/lib/systemd/system", "usr/lib/systemd/system"}

// unitNaming returns the service whose unit file or drop-ins contain the path of a driver's socket;
// empty if there is none or more than one.
func (x *diagnosis) unitNaming(ctx context.Context, driver string) string {
	d, _ := x.config.Config.Driver(driver)
	socket := regexp.MustCompile(`(^|[^/\pL\pN_.-])(//)?` + regexp.QuoteMeta(d.Socket) + `($|[^/\pL\pN_.-])`)
	units, err := look(ctx, x, "/etc/systemd/system", func() (map[string]bool, error) {
		units := map[string]bool{}
		for _, dir := range unitDirs {
			files, _ := fs.Glob(os.DirFS(filepath.Join(x.o.Root, dir)), "*.service")
			dropIns, _ := fs.Glob(os.DirFS(filepath.Join(x.o.Root, dir)), "*.service.d/*.conf")
			for _, file := range append(files, dropIns...) {
				unit, _, _ := strings.Cut(file, ".d/")
				if strings.HasPrefix(unit, "csi-registrar") || strings.Contains(unit, "@.") || !safetext.UnitName(unit) {
					continue
				}
				text, err := readSome(filepath.Join(x.o.Root, dir, file), maxProcFile)
				if err == nil && socket.Match(text) {
					units[unit] = true
				}
			}
		}
		return units, nil
	})
	if err != nil || d.Socket == "" || len(units) != 1 {
		return ""
	}
	return sortedKeys(units)[0]
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

// userOf returns User= of a unit; empty if it is root or not known.
func (x *diagnosis) userOf(ctx context.Context, unit string) string {
	p, _ := x.o.Units.Show(ctx, unit, "User")
	return p["User"]
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
	case s.named:
		return append([]Fix{note("the file of %s names this socket", s.unit)}, append(s.log(), systemctl("restart", s.unit))...)
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
