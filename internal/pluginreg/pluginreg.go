// Package pluginreg knows the plugins_registry, the directory in which the kubelet looks for
// registration sockets: the names in it, what the kubelet sees of it, and how the kubelet
// asks a socket who it is. The daemon's kubelet side and doctor both use it.
package pluginreg

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// DirName is the directory's name below the kubelet's root directory.
const DirName = "plugins_registry"

// suffix ends the name of a registration socket. It is node-driver-registrar's, so that both
// meet at one path.
const suffix = "-reg.sock"

// Dir is the plugins_registry of a kubelet with this root directory (--root-dir).
func Dir(rootDir string) string { return filepath.Join(rootDir, DirName) }

// SocketPath is the path of a driver's registration socket in dir. The name is checked before
// a path is made of it (status.ErrName), and the path for its length.
func SocketPath(dir, driver string) (string, error) {
	if err := status.CheckName(driver); err != nil {
		return "", err
	}
	path := filepath.Join(dir, driver+suffix)
	if err := unixsock.CheckPath(path); err != nil {
		return "", fmt.Errorf("cannot make a registration socket for %s: %w: use a shorter root_dir", driver, err)
	}
	return path, nil
}

// IsSocketOf reports whether path has the name of the driver's registration socket.
func IsSocketOf(path, driver string) bool { return filepath.Base(path) == driver+suffix }

const (
	maxEntries  = 10000 // of the directory that are looked at
	maxSubdepth = 8
)

// Sockets returns the sockets in dir and below, and links that may point to one, that the
// kubelet sees: it ignores names that begin with a dot (kubelet v1.36). What cannot be read is
// left out. It blocks for as long as the file system does not answer.
func Sockets(dir string) []string {
	var found []string
	left := maxEntries
	var read func(dir string, depth int)
	read = func(dir string, depth int) {
		d, err := os.Open(dir)
		if err != nil {
			return
		}
		defer d.Close()
		entries, _ := d.ReadDir(left)
		left -= len(entries)
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			switch {
			case strings.HasPrefix(e.Name(), "."):
			case e.IsDir() && depth < maxSubdepth && left > 0:
				read(path, depth+1)
			case e.Type()&(fs.ModeSocket|fs.ModeSymlink) != 0:
				found = append(found, path)
			}
		}
	}
	read(dir, 0)
	return found
}

// Info is what a registration socket tells the kubelet, as it was sent: strings are a
// stranger's.
type Info struct {
	Type     string // registerapi.CSIPlugin, DRAPlugin or DevicePlugin
	Name     string
	Endpoint string
	Versions []string
}

// maxMessage is the largest answer in bytes: a GetInfo has a few hundred.
const maxMessage = 64 << 10

// GetInfo asks the socket at path who it is, as the kubelet does (which waits 1 s for it,
// kubelet v1.36), and who listens there. The error is gRPC's, or the system's for dialling.
func GetInfo(ctx context.Context, path string) (Info, unixsock.Cred, error) {
	c, err := unixsock.Dial(ctx, path)
	if err != nil {
		return Info{}, unixsock.Cred{}, err
	}
	defer c.Close()
	cred, err := unixsock.PeerCred(c)
	if err != nil {
		return Info{}, cred, err
	}
	cc, err := unixsock.NewClient(c, maxMessage)
	if err != nil {
		return Info{}, cred, err
	}
	defer cc.Close()
	in, err := registerapi.NewRegistrationClient(cc).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return Info{}, cred, err
	}
	return Info{Type: in.GetType(), Name: in.GetName(), Endpoint: in.GetEndpoint(), Versions: in.GetSupportedVersions()}, cred, nil
}
