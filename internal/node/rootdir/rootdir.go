// Package rootdir names the paths below the kubelet's root directory (--root-dir) that the kubelet,
// the daemon and node-driver-registrar agree on. It does not touch the file system.
package rootdir

import (
	"fmt"
	"path/filepath"
	"strings"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/unixsock"
)

// PluginsRegistryName is the name of the directory that the kubelet watches for registration
// sockets.
const PluginsRegistryName = "plugins_registry"

// socketSuffix ends the name of a registration socket. node-driver-registrar uses the same one, so
// that both compete for one path.
const socketSuffix = "-reg.sock"

// PluginsRegistry returns the directory that the kubelet watches for registration sockets.
func PluginsRegistry(rootDir string) string { return filepath.Join(rootDir, PluginsRegistryName) }

// SocketName returns the file name of a driver's registration socket.
func SocketName(driver string) string { return driver + socketSuffix }

// SocketPath returns the path of a driver's registration socket in dir. It checks the name before
// it becomes part of a path (csiname.CheckName), and the length of the path.
func SocketPath(dir, driver string) (string, error) {
	if err := csiname.CheckName(driver); err != nil {
		return "", err
	}
	path := filepath.Join(dir, SocketName(driver))
	if err := unixsock.CheckPath(path); err != nil {
		return "", fmt.Errorf("cannot make a registration socket for %s: %w: use a shorter root_dir", driver, err)
	}
	return path, nil
}

// DriverName returns the driver whose registration socket would have this file name, and whether it
// is the name of one.
func DriverName(socketName string) (driver string, ok bool) {
	return strings.CutSuffix(socketName, socketSuffix)
}
