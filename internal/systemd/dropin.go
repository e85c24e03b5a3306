package systemd

import (
	"path"
	"strings"

	"csi-registrar/internal/rootdir"
)

const defaultKubeletDir = "/var/lib/kubelet"

// DropInFile is where the lines of DropIn belong.
const DropInFile = "/etc/systemd/system/csi-registrar.service.d/root-dir.conf"

// DropIn gives the exact lines of the unit drop-in that the service needs where the kubelet's root
// directory is not /var/lib/kubelet: empty if it is. The service may write only where
// ReadWritePaths= says, which ExecStartPre= makes below KUBELET_ROOT_DIR; without the dash a
// missing directory would keep the service from starting (226/NAMESPACE). RequiresMountsFor= has it
// there before the service's own view of the file system is made. What ProtectHome= or PrivateTmp=
// of the shipped unit hides, ReadWritePaths= cannot bring back (systemd.exec(5)).
func DropIn(rootDir string) string {
	unit, service := DropInLines(rootDir)
	if unit == "" {
		return ""
	}
	return "# " + DropInFile + "\n[Unit]\n" + unit + "\n\n[Service]\n" + strings.Join(service, "\n") + "\n"
}

// DropInLines gives the lines of the drop-in's two sections: none for the default.
func DropInLines(rootDir string) (unit string, service []string) {
	rootDir = path.Clean(rootDir)
	if rootDir == defaultKubeletDir {
		return "", nil
	}
	service = []string{
		"Environment=" + escapePath("KUBELET_ROOT_DIR="+rootDir),
		"ReadWritePaths=-" + escapePath(rootdir.PluginsRegistry(rootDir)) + " -" + escapePath(rootdir.EndpointLinks(rootDir)),
	}
	if _, setting := Hider(rootDir); setting != "" {
		service = append(service, setting+"=no")
	}
	return "RequiresMountsFor=" + escapePath(rootDir), service
}

// Hider finds the directory of which the shipped unit gives the service an empty one of its
// own, and the setting that does, for a path in it; empty for all others.
func Hider(p string) (dir, setting string) {
	for _, dir := range []string{"/home", "/root", "/run/user"} {
		if Within(p, dir) {
			return dir, "ProtectHome"
		}
	}
	for _, dir := range []string{"/tmp", "/var/tmp"} {
		if Within(p, dir) {
			return dir, "PrivateTmp"
		}
	}
	return "", ""
}

// Hides reports whether a value of ProtectHome= or PrivateTmp=, as systemctl shows it, keeps
// what is there out of sight.
func Hides(value string) bool { return value != "" && value != "no" && value != "read-only" }

// escapePath writes a path as a unit file wants it: % begins a specifier, and a path with
// spaces is quoted.
func escapePath(p string) string {
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
