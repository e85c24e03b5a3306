package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

// server is what is known about the process that serves a driver's socket, or served it last.
type server struct {
	pid                  int    // 0: it has ended, or is not known
	unit, pod, container string // checked; empty if not known
	// how its unit ended, as the rest of a sentence; empty if it runs or is not known
	ended  string
	revive []Fix // what must be done before its unit can be started
	named  bool  // the daemon did not see it; the file of unit names the socket
}

// serverOf returns the server of a driver's socket: the process who or, if who is zero, the process
// that served it last.
func (x *diagnosis) serverOf(ctx context.Context, driver string, who process) server {
	s := server{pid: who.pid, unit: who.unit, pod: who.pod, container: who.container}
	if !strings.HasSuffix(s.unit, ".service") {
		s.unit = ""
	}
	if who.pid == 0 {
		s = x.lastServer(ctx, driver)
	}
	if s.unit != "" {
		s.ended, s.revive = x.lastExit(ctx, s.unit)
	}
	if who.stopped {
		s.ended, s.revive = "; "+who.String()+" is stopped by a signal, SIGSTOP", []Fix{run("kill", "-CONT", strconv.Itoa(who.pid))}
	}
	return s
}

// configuredServer returns the server of a driver's socket, which does not do what it should, and
// what the administrator's drop-ins of a unit that runs set, as the rest of a sentence.
func (x *diagnosis) configuredServer(ctx context.Context, driver string, who process) (s server, set string) {
	if s = x.serverOf(ctx, driver, who); s.unit == "" || s.ended != "" {
		return s, s.ended
	}
	set, s.revive = x.dropIns(ctx, s.unit)
	return s, set
}

// lastServer returns who served a driver's socket last. The daemon only says which of those it was
// that can be: a unit whose files name the socket, or a pod whose directory the kubelet has.
func (x *diagnosis) lastServer(ctx context.Context, driver string) (s server) {
	st, _ := x.daemon.Driver(driver)
	units := x.unitsNaming(ctx, driver)
	s.unit = st.Server.Unit.Checked(func(unit string) bool { return units[unit] })
	s.pod = st.Server.Pod.Checked(func(uid string) bool {
		dir := filepath.Join(x.config.Config.Kubelet.RootDir, "pods", uid)
		_, err := x.stat(ctx, dir)
		return safetext.ShellWord(uid) == uid && filepath.Base(dir) == uid && err == nil
	})
	if s.unit+s.pod == "" && len(units) == 1 {
		s.unit, s.named = sortedKeys(units)[0], true
	}
	return s
}

// unitDirs are the directories of unit files, except those for units that systemd's commands create
// at run time.
var unitDirs = []string{"etc/systemd/system", "run/systemd/system", "run/systemd/generator", "usr/local/lib/systemd/system", "usr/lib/systemd/system"}

// unitsNaming returns the services whose unit files or drop-ins contain the path of a driver's
// socket.
func (x *diagnosis) unitsNaming(ctx context.Context, driver string) map[string]bool {
	d, _ := x.config.Config.Driver(driver)
	if d.Socket == "" {
		return nil
	}
	socket := regexp.MustCompile(`(^|[^/\pL\pN_.-])(//)?` + regexp.QuoteMeta(d.Socket) + `($|[^/\pL\pN_.-])`)
	// An error: a file system does not answer.
	units, _ := look(ctx, x, "/etc/systemd/system", func() (map[string]bool, error) {
		units := map[string]bool{}
		for _, dir := range unitDirs {
			files, _ := fs.Glob(os.DirFS(filepath.Join("/", x.o.Source.Root, dir)), "*.service")
			dropIns, _ := fs.Glob(os.DirFS(filepath.Join("/", x.o.Source.Root, dir)), "*.service.d/*.conf")
			for _, file := range append(files, dropIns...) {
				unit, _, _ := strings.Cut(file, ".d/")
				if strings.HasPrefix(unit, "csi-registrar") || strings.Contains(unit, "@.") || !safetext.UnitName(unit) {
					continue
				}
				text, err := readSome(filepath.Join("/", x.o.Source.Root, dir, file), maxProcFile)
				if err == nil && socket.Match(text) {
					units[unit] = true
				}
			}
		}
		return units, nil
	})
	return units
}

// log returns the commands that show the last log entries.
func (s server) log() []Fix {
	switch {
	case s.unit != "":
		return []Fix{run("systemctl", "--no-pager", "status", s.unit), logOf(s.unit)}
	case s.pod == "":
		return nil
	}
	fix := []Fix{run("crictl", "ps", "--all", "--label", "io.kubernetes.pod.uid="+s.pod)}
	if s.container != "" {
		fix = append(fix, run("crictl", "logs", "--tail", "20", s.container))
	}
	return fix
}

// restart returns the commands that show the last log entries and restart it.
func (s server) restart() []Fix {
	switch {
	case s.unit != "":
		fix := s.log()
		if s.named {
			fix = append([]Fix{note("the file of %s names this socket", s.unit)}, fix...)
		}
		return slices.Concat(fix, s.revive, s.start())
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

// start returns the command that starts a unit again. A driver with supervise would hold up the
// next line until it is ready.
func (s server) start() []Fix { return []Fix{run("systemctl", "restart", "--no-block", s.unit)} }

// Server says who runs a configured driver, as far as it is known. It is checked.
type Server struct{ Driver, Unit, Pod string }

// Servers returns who runs the configured drivers: the process that serves the socket now, or what
// served it last.
func Servers(ctx context.Context, source config.Source) []Server {
	x := newDiagnosis(Options{Source: source, Root: "/", Units: Systemctl{}})
	x.loadConfig(ctx)
	x.daemon = x.askDaemon(ctx)
	return each(x.config.Config.Drivers, func(d config.Driver) Server {
		y := *x // whose findings nobody sees
		c, who := y.reach(ctx, d)
		if c != nil {
			c.Close()
		}
		s := y.serverOf(ctx, d.Name, who)
		return Server{d.Name, s.unit, s.pod}
	})
}

const (
	maxNearby  = 20   // sockets that are asked
	maxEntries = 1000 // names of a directory that are looked at
)

// missing reports that a driver's socket does not exist, and where the driver listens instead, or
// what served the socket last.
func (x *diagnosis) missing(ctx context.Context, d config.Driver, found string, last server) {
	expected := "the driver runs and creates its socket there"
	if other := x.nearby(ctx, d); other != "" && other != d.Socket {
		x.finding(d.Name, "socket", "driver-socket-missing", found+"; the driver listens on "+safetext.Word(other)+", and socket is set in "+x.origin(d.Name, "socket"), expected,
			x.setDriverKey(d.Name, "socket", safetext.Quote(other))...)
		return
	}
	st, _ := x.daemon.Driver(d.Name)
	fix := last.restart()
	if unit := st.Server.Unit.String(); last.unit == "" && strings.Contains(unit, ".service") {
		found += "; the daemon saw " + unit + " serve it, and no file of that unit names the socket any more"
		fix = []Fix{note("put the file of that unit back, which is gone, empty or another one, then run systemctl daemon-reload and start the unit")}
	}
	fix = append(fix, note("if it listens elsewhere: set socket in the table of the driver"))
	pid, _ := strconv.Atoi(x.show(ctx, last.unit)["MainPID"])
	own := x.listening(ctx, pid)
	ports, sockets := own.ports, slices.DeleteFunc(own.paths, func(path string) bool { return path == d.Socket })
	wrong, correct := x.obstacle(ctx, last.unit, path.Dir(d.Socket), "mkdir "+path.Dir(d.Socket)+": file exists, no such file, not permitted, permission denied")
	if wrong != "" {
		found += "; " + wrong
	}
	switch {
	case len(sockets) == 1:
		found += fmt.Sprintf("; its process %d listens on %s", pid, safetext.Word(sockets[0]))
		fix = append(x.correctEndpoint(ctx, last.unit, sockets[0], d.Socket), last.start()...)
	case len(ports) > 0:
		found += fmt.Sprintf("; its process %d listens on TCP port %s: a driver's flag --endpoint must name a Unix socket", pid, strings.Join(ports, ", "))
		line, _ := readSome(x.procPath(pid, "cmdline"), maxProcFile) // an error: it has ended
		fix = append(x.correctEndpoint(ctx, last.unit, cmp.Or(string(tcpAddress.Find(line)), "its address"), "unix://"+d.Socket), last.start()...)
	case wrong != "" && !certain(correct):
	case wrong != "" && last.unit != "":
		fix = slices.Concat(correct, slices.DeleteFunc(last.revive, Fix.IsComment), last.start())
	case wrong != "":
		fix = append(correct, fix...)
	case last.ended == "" && pid > 0:
		found += fmt.Sprintf("; %s runs (process %d): its socket was removed", last.unit, pid)
		if why, uncover := x.obstacle(ctx, last.unit, d.Socket, "no such file"); strings.Contains(why, " mounted ") {
			if found, fix = found+", or "+why, append(fix, uncover[1:]...); certain(uncover) {
				fix = uncover
			}
		}
	}
	x.finding(d.Name, "socket", "driver-socket-missing", found+last.ended, expected, fix...)
}

// covers reports whether a mount hides others that were made below its mount point before.
func (x *diagnosis) covers(ctx context.Context, m mountinfo.Mount) bool {
	all := x.mountsOf(ctx, "self")
	before := slices.IndexFunc(all, func(o mountinfo.Mount) bool { return o.ID == m.ID })
	return slices.ContainsFunc(all[:max(before, 0)], func(o mountinfo.Mount) bool { return o.Point != m.Point && rootdir.Within(o.Point, m.Point) })
}

// tcpAddress matches the address in the command line of a driver that listens on TCP.
var tcpAddress = regexp.MustCompile(`tcp:[^\x00]*`)

// plainAddress matches what is not special in an expression of sed.
var plainAddress = regexp.MustCompile(`^[\w./:@-]+$`)

// correctEndpoint returns the edit after which a driver that listens elsewhere has its own socket.
func (x *diagnosis) correctEndpoint(ctx context.Context, unit, given, right string) []Fix {
	place, _ := x.placeInUnit(ctx, unit, given)
	edit := note("in %s write %s in place of %s, then run the next lines", cmp.Or(place, "its unit"), safetext.ShellWord(right), safetext.ShellWord(given))
	if i := strings.LastIndexByte(place, ':'); strings.HasPrefix(place, "/etc/") && plainAddress.MatchString(given) && plainAddress.MatchString(right) {
		edit = run("sed", "-i", fmt.Sprintf("%ss|%s|%s|", place[i+1:], given, right), place[:i])
	}
	return []Fix{edit, run("systemctl", "daemon-reload")}
}

// nearby returns a trusted socket near the configured one, or where drivers usually listen, at
// which the driver answers; empty if there is none.
func (x *diagnosis) nearby(ctx context.Context, d config.Driver) string {
	var candidates []string
	plugins, run := filepath.Join(x.config.Config.Kubelet.RootDir, "plugins"), filepath.Join(x.o.Root, "run")
	for _, socket := range []string{d.Socket, filepath.Join(d.Socket, "csi.sock"), filepath.Join(plugins, d.Name, "csi.sock"), filepath.Join(run, d.Name, "csi.sock")} {
		// An error: a file system does not answer.
		found, _ := look(ctx, x, path.Dir(socket), func() ([]string, error) { return socketsNear(socket), nil })
		candidates = append(candidates, found...)
	}
	for i, name := range each(candidates, func(socket string) string {
		// It fails at a socket that another program serves.
		name, _ := driver.LiveName(ctx, x.pool, d.SocketOwner, socket)
		return name
	}) {
		if name == d.Name {
			return candidates[i]
		}
	}
	return ""
}

// socketsNear lists the sockets in the directory of a socket, and those in the directories beside
// that. Where programs of all kinds have directories, such as /run, only paths with "csi" count.
func socketsNear(socket string) (found []string) {
	dir := path.Dir(socket)
	dirs := []string{dir}
	parent := path.Dir(dir)
	shared := strings.Count(parent, "/") == 1 || parent == "/var/lib" || parent == "/var/run"
	if parent != "/" {
		entries, _ := os.ReadDir(parent)
		for _, e := range entries[:min(len(entries), maxEntries)] {
			dirs = append(dirs, filepath.Join(parent, e.Name()))
		}
	}
	for i, d := range dirs {
		entries, _ := os.ReadDir(d) // an error: it is no directory
		for _, e := range entries[:min(len(entries), maxEntries)] {
			file := filepath.Join(d, e.Name())
			if i > 0 && (d == dir || shared && !strings.Contains(file, "csi")) {
				continue
			}
			if at, err := unixsock.Lstat(file); err == nil && at.IsSocket() && len(found) < maxNearby {
				found = append(found, file)
			}
		}
	}
	return found
}
