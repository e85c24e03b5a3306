package doctor

import (
	"context"
	"os"
	"path"
	"path/filepath"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

const (
	maxNearby  = 20   // sockets that are asked
	maxEntries = 1000 // names that are read of a directory
)

// missing reports that a driver's socket does not exist, and where the driver listens instead, or
// what served the socket last.
func (x *diagnosis) missing(ctx context.Context, d config.Driver, found string, last server) {
	expected := "the driver runs and creates its socket there"
	if other := x.nearby(ctx, d); other != "" {
		x.problem(d.Name, StepSocket, DriverSocketMissing, found+"; the driver listens on "+safetext.Word(other), expected,
			x.setDriverKey(d.Name, "socket", safetext.Quote(other))...)
		return
	}
	fix := append(last.restart(), note("if it listens elsewhere: set socket in the table of the driver"))
	x.problem(d.Name, StepSocket, DriverSocketMissing, found+last.ended, expected, fix...)
}

// nearby returns a trusted socket near the configured one at which the driver answers; empty if
// there is none.
func (x *diagnosis) nearby(ctx context.Context, d config.Driver) string {
	dir := path.Dir(d.Socket)
	candidates, err := look(ctx, x, dir, func() ([]string, error) { return socketsNear(d.Socket), nil })
	if err != nil {
		return ""
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
		for _, name := range names(parent) {
			dirs = append(dirs, filepath.Join(parent, name))
		}
	}
	for i, d := range dirs {
		for _, name := range names(d) {
			file := filepath.Join(d, name)
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

// names returns the names in a directory, at most maxEntries; none if it cannot be read.
func names(dir string) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	list, err := f.Readdirnames(maxEntries)
	if err != nil {
		return nil
	}
	return list
}
