package doctor

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

const (
	maxNearby  = 20   // sockets that are asked
	maxEntries = 1000 // names of a directory that are looked at
)

// missing reports that a driver's socket does not exist, and where the driver listens instead, or
// what served the socket last.
func (x *diagnosis) missing(ctx context.Context, d config.Driver, found string, last server) {
	expected := "the driver runs and creates its socket there"
	if other := x.nearby(ctx, d); other != "" {
		x.finding(d.Name, "socket", "driver-socket-missing", found+"; the driver listens on "+safetext.Word(other), expected,
			x.setDriverKey(d.Name, "socket", safetext.Quote(other))...)
		return
	}
	fix := append(last.restart(), note("if it listens elsewhere: set socket in the table of the driver"))
	if last.unit != "" {
		pid, _ := strconv.Atoi(x.show(ctx, last.unit, "MainPID")["MainPID"])
		ports := x.tcpPorts(ctx, pid)
		if dir := path.Dir(d.Socket); last.ended == "" && pid > 0 && len(ports) == 0 {
			found += fmt.Sprintf("; %s runs (process %d): its socket was removed", last.unit, pid)
			if m := x.mountOf(ctx, dir); m.Point == dir {
				found += ", or is covered by what is mounted at " + safetext.Word(m.Point) + ", type " + safetext.Word(m.Type)
			}
		}
		if len(ports) > 0 {
			found += fmt.Sprintf("; its process %d listens on TCP port %s: a driver's flag --endpoint must name a Unix socket", pid, strings.Join(ports, ", "))
			fix = append(x.correctEndpoint(ctx, d, last.unit, pid), last.start()...)
		}
	}
	x.finding(d.Name, "socket", "driver-socket-missing", found+last.ended, expected, fix...)
}

// correctEndpoint returns the edit after which a driver that listens on TCP listens on its socket.
func (x *diagnosis) correctEndpoint(ctx context.Context, d config.Driver, unit string, pid int) []Fix {
	line, _ := readSome(x.procPath(pid, "cmdline"), maxProcFile) // an error: it has ended
	given := "its address"
	for arg := range strings.SplitSeq(string(line), "\x00") {
		if at := strings.Index(arg, "tcp:"); at >= 0 {
			given = arg[at:]
		}
	}
	file, p := "its unit", x.show(ctx, unit, "FragmentPath", "DropInPaths")
	// The last one counts.
	for _, f := range strings.Fields(p["FragmentPath"] + " " + p["DropInPaths"]) {
		text, err := look(ctx, x, f, func() ([]byte, error) { return readSome(filepath.Join("/", x.o.Source.Root, f), maxProcFile) })
		if err == nil && strings.Contains(string(text), given) {
			file = safetext.ShellWord(f)
		}
	}
	return []Fix{note("in %s write unix://%s in place of %s, then run the next lines", file, safetext.ShellWord(d.Socket), safetext.ShellWord(given)),
		run("systemctl", "daemon-reload")}
}

// nearby returns a trusted socket near the configured one, or where drivers usually listen, at
// which the driver answers; empty if there is none.
func (x *diagnosis) nearby(ctx context.Context, d config.Driver) string {
	var candidates []string
	plugins, run := filepath.Join(x.config.Config.Kubelet.RootDir, "plugins"), filepath.Join(x.o.Root, "run")
	for _, socket := range []string{d.Socket, filepath.Join(plugins, d.Name, "csi.sock"), filepath.Join(run, d.Name, "csi.sock")} {
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
