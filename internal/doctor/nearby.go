package doctor

import (
	"context"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
)

const (
	maxNearby  = 20   // sockets that are asked
	maxEntries = 1000 // names that are read of a directory
)

// missing reports that there is no socket of a driver, and where the driver listens instead, or
// what served the socket last.
func (x *diagnosis) missing(ctx context.Context, d config.Driver, found string, last server) {
	expected := "the driver runs and makes its socket there"
	if other := x.nearby(ctx, d); other != "" {
		x.problem(d.Name, StepSocket, DriverSocketMissing, found+"; the driver listens on "+safetext.Word(other), expected,
			x.setDriverKey(d.Name, "socket", safetext.Quote(other))...)
		return
	}
	fix := append(last.restart(), note("if it listens elsewhere: set socket in the table of the driver"))
	x.problem(d.Name, StepSocket, DriverSocketMissing, found+last.end(), expected, fix...)
}

// nearby looks beside the configured socket for one at which the driver answers, and which may be
// trusted as the configured one; empty if there is none.
func (x *diagnosis) nearby(ctx context.Context, d config.Driver) string {
	dir := path.Dir(d.Socket)
	candidates, err := look(ctx, x, dir, func() ([]string, error) { return socketsNear(d.Socket), nil })
	if err != nil {
		return ""
	}
	for i, ok := range each(candidates, func(socket string) bool { return x.answers(ctx, d, socket) }) {
		if ok {
			return candidates[i]
		}
	}
	return ""
}

// socketsNear lists the sockets in the directory of a socket, and those in the directories beside
// that which have "csi" in their path.
func socketsNear(socket string) (found []string) {
	dir := path.Dir(socket)
	dirs := []string{dir}
	if parent := path.Dir(dir); parent != "/" {
		for _, name := range names(parent) {
			dirs = append(dirs, filepath.Join(parent, name))
		}
	}
	for i, d := range dirs {
		for _, name := range names(d) {
			file := filepath.Join(d, name)
			if i > 0 && (d == dir || !strings.Contains(file, "csi")) {
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

// answers reports whether the driver with the configured name answers at a socket, and may be
// trusted.
func (x *diagnosis) answers(ctx context.Context, d config.Driver, socket string) bool {
	rule := trust.SocketOwner(d.SocketOwner)
	if _, err := look(ctx, x, socket, func() (struct{}, error) { return struct{}{}, rule.Path(socket) }); err != nil {
		return false
	}
	c, cred, err := x.dial(ctx, socket)
	if err != nil {
		return false
	}
	defer c.Close()
	if rule.Listener(socket, cred) != nil {
		return false
	}
	conn, err := unixsock.NewClient(c, maxAnswer)
	if err != nil {
		return false
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	r, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	return err == nil && r.GetName() == d.Name
}
