// Package rootdir names the paths below the kubelet's root directory (--root-dir) that the kubelet,
// the daemon and node-driver-registrar agree on. It does not touch the file system.
package rootdir

import (
	"fmt"
	"path"
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

const defaultKubeletDir = "/var/lib/kubelet"

// RootDirVariable has the kubelet's root directory in the unit's environment, for the command that
// creates what ReadWritePaths= opens there (`cleanup --ask`).
const RootDirVariable = "KUBELET_ROOT_DIR"

// hidden are the names below the kubelet's root directory that the shipped unit hides from the
// daemon for the default: keys, the sockets with which a program becomes a device plugin, and pull
// secrets. A missing one is not created, and no file system is mounted below one.
var hidden = []string{"pki", "device-plugins", "pod-resources", "kubeconfig", "bootstrap-kubeconfig", "config.json", ".dockercfg"}

// DropInFile is the path of the drop-in that DropIn returns.
const DropInFile = "/etc/systemd/system/csi-registrar.service.d/root-dir.conf"

// DropIn returns the drop-in that the unit needs if the kubelet's root directory is not
// /var/lib/kubelet; empty if it is. The service may write only to ReadWritePaths=, which
// ExecStopPost= creates before a restart; without the dash a missing directory would prevent the
// start of the service (226/NAMESPACE). RequiresMountsFor= mounts it before systemd creates the
// service's mount namespace. ReadWritePaths= has no effect on directories that ProtectHome= or
// PrivateTmp= of the shipped unit hides (systemd.exec(5)).
func DropIn(rootDir string) string {
	unit, service := DropInLines(rootDir)
	if unit == "" {
		return ""
	}
	return "# " + DropInFile + "\n[Unit]\n" + unit + "\n\n[Service]\n" + strings.Join(service, "\n") + "\n"
}

// DropInLines returns the lines of the drop-in's two sections; none for the default.
func DropInLines(rootDir string) (unit string, service []string) {
	rootDir = path.Clean(rootDir)
	if rootDir == defaultKubeletDir {
		return "", nil
	}
	var masks []string
	for _, name := range hidden {
		masks = append(masks, "-"+EscapePath(path.Join(rootDir, name)))
	}
	service = []string{
		"Environment=" + EscapePath(RootDirVariable+"="+rootDir),
		"ReadWritePaths=-" + EscapePath(PluginsRegistry(rootDir)),
		"InaccessiblePaths=" + strings.Join(masks, " "),
	}
	if _, setting := Hider(rootDir); setting != "" {
		service = append(service, setting+"=no")
	}
	return "RequiresMountsFor=" + EscapePath(rootDir), service
}

// Hider returns the directory on a path that the shipped unit hides from the service behind an
// empty one, and the setting that hides it; empty if there is none.
func Hider(p string) (dir, setting string) {
	for _, h := range []struct{ dir, setting string }{
		{"/home", "ProtectHome"}, {"/root", "ProtectHome"}, {"/run/user", "ProtectHome"},
		{"/tmp", "PrivateTmp"}, {"/var/tmp", "PrivateTmp"},
	} {
		if Within(p, h.dir) {
			return h.dir, h.setting
		}
	}
	return "", ""
}

// Hides reports whether a value of ProtectHome= or PrivateTmp=, as systemctl shows it, hides the
// directories.
func Hides(value string) bool { return value != "" && value != "no" && value != "read-only" }

// EscapePath escapes a path for a unit file: % begins a specifier, and a path with spaces is
// quoted.
func EscapePath(p string) string {
	p = strings.ReplaceAll(p, "%", "%%")
	if !strings.ContainsAny(p, " \t\"'\\") {
		return p
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(p) + `"`
}

// Within reports whether a clean path is dir or is below it.
func Within(p, dir string) bool {
	dir = path.Clean(dir)
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}
