// Package rootdir names the paths below the kubelet's root directory (--root-dir) that the kubelet,
// the daemon and node-driver-registrar agree on. It does not touch the file system.
package rootdir

import (
	"path/filepath"
	"strings"
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

// DriverName returns the driver whose registration socket would have this file name, and whether it
// is the name of one.
func DriverName(socketName string) (driver string, ok bool) {
	return strings.CutSuffix(socketName, socketSuffix)
}

// EndpointLinks returns the directory of the endpoint links.
func EndpointLinks(rootDir string) string { return filepath.Join(rootDir, "plugins", "csi-registrar") }

// EndpointLink returns the path of the symbolic link that the kubelet is given instead of the
// driver's socket.
func EndpointLink(rootDir, driver string) string {
	return filepath.Join(EndpointLinks(rootDir), driver+".sock")
}
