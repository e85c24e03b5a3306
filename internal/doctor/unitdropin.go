package doctor

import (
	"path"
	"strings"
	"unicode"
)

// unitDropInFile is where the lines of UnitDropIn belong.
const unitDropInFile = "/etc/systemd/system/csi-registrar.service.d/root-dir.conf"

// UnitDropIn gives the exact lines of the unit drop-in that the service needs where the
// kubelet's root directory is not /var/lib/kubelet: empty if it is. The service may write
// only where ReadWritePaths= says; the directory itself is named, not plugins_registry,
// because that may have to be created again; without the dash a missing one would keep the
// service from starting (226/NAMESPACE). RequiresMountsFor= has it there before the
// service's own view of the file system is made. What ProtectHome= or PrivateTmp= of the
// shipped unit hides, ReadWritePaths= cannot bring back (systemd.exec(5)).
func UnitDropIn(rootDir string) string {
	unit, service := unitDropIn(rootDir)
	if unit == "" {
		return ""
	}
	return "# " + unitDropInFile + "\n[Unit]\n" + unit + "\n\n[Service]\n" + strings.Join(service, "\n") + "\n"
}

// unitDropIn gives the lines of the drop-in's two sections: none for the default.
func unitDropIn(rootDir string) (unit string, service []string) {
	rootDir = path.Clean(rootDir)
	if rootDir == defaultRootDir {
		return "", nil
	}
	p := unitPath(rootDir)
	service = []string{"ReadWritePaths=-" + p}
	if _, setting := hider(rootDir); setting != "" {
		service = append(service, setting+"=no")
	}
	return "RequiresMountsFor=" + p, service
}

// hider finds the directory of which the shipped unit gives the service an empty one of its
// own, and the setting that does, for a path in it; empty for all others.
func hider(p string) (dir, setting string) {
	for _, dir := range []string{"/home", "/root", "/run/user"} {
		if within(p, dir) {
			return dir, "ProtectHome"
		}
	}
	for _, dir := range []string{"/tmp", "/var/tmp"} {
		if within(p, dir) {
			return dir, "PrivateTmp"
		}
	}
	return "", ""
}

// hides reports whether a value of ProtectHome= or PrivateTmp=, as systemctl shows it, keeps
// what is there out of sight.
func hides(value string) bool { return value != "" && value != "no" && value != "read-only" }

// installUnitDropIn puts UnitDropIn's lines in place.
func installUnitDropIn(rootDir string) []Fix {
	if strings.ContainsFunc(rootDir, unicode.IsControl) { // it could be lines of a unit file
		return []Fix{text("give the kubelet a root directory without control characters in its name")}
	}
	unit, service := unitDropIn(rootDir)
	if unit == "" {
		return append([]Fix{run("rm", "-f", unitDropInFile)}, reloadUnits()...)
	}
	return writeDropIn(unitDropInFile, append([]string{"[Unit]", unit, "[Service]"}, service...)...)
}

// writeDropIn writes a drop-in of the service and makes it count.
func writeDropIn(file string, lines ...string) []Fix {
	write := run("printf", append([]string{`%s\n`}, lines...)...)
	write.Command.Stdout = file
	return append([]Fix{run("mkdir", "-p", path.Dir(file)), write}, reloadUnits()...)
}

func reloadUnits() []Fix {
	return []Fix{run("systemctl", "daemon-reload"), run("systemctl", "restart", serviceUnit)}
}

// unitPath writes a path as a unit file wants it: % begins a specifier, and a path with
// spaces is quoted.
func unitPath(p string) string {
	p = strings.ReplaceAll(p, "%", "%%")
	if !strings.ContainsAny(p, " \t\"'\\") {
		return p
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(p) + `"`
}

// within reports whether a clean path is dir or is below it.
func within(p, dir string) bool {
	dir = path.Clean(dir)
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}
