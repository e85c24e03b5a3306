package doctor

import (
	"path"
	"strings"
)

// unitDropInFile is where the lines of UnitDropIn belong.
const unitDropInFile = "/etc/systemd/system/csi-registrar.service.d/root-dir.conf"

// UnitDropIn gives the exact lines of the unit drop-in that the service needs where the
// kubelet's root directory is not /var/lib/kubelet: empty if it is. The service may write
// only where ReadWritePaths= says; the directory itself is named, not plugins_registry,
// because that may have to be made anew; without the dash a missing one would keep the
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

// hider finds the folder of which the shipped unit gives the service an empty one of its
// own, and the setting that does, for a path in it; empty for all others.
func hider(p string) (folder, setting string) {
	for _, folder := range []string{"/home", "/root", "/run/user"} {
		if within(p, folder) {
			return folder, "ProtectHome"
		}
	}
	for _, folder := range []string{"/tmp", "/var/tmp"} {
		if within(p, folder) {
			return folder, "PrivateTmp"
		}
	}
	return "", ""
}

// hides tells whether a value of ProtectHome= or PrivateTmp=, as systemctl shows it, keeps
// what is there out of sight.
func hides(value string) bool { return value != "" && value != "no" && value != "read-only" }

// installUnitDropIn gives the commands that put UnitDropIn's lines in place.
func installUnitDropIn(rootDir string) []string {
	restart := []string{"systemctl daemon-reload", "systemctl restart " + serviceUnit}
	unit, service := unitDropIn(rootDir)
	if unit == "" {
		return append([]string{"rm -f " + unitDropInFile}, restart...)
	}
	write := "printf '%s\\n' '[Unit]' " + shellQuote(unit) + " '[Service]'"
	for _, line := range service {
		write += " " + shellQuote(line)
	}
	return append([]string{"mkdir -p " + path.Dir(unitDropInFile), write + " > " + unitDropInFile}, restart...)
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

// shellQuote makes one word for a shell of s.
func shellQuote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:@%+,") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// within tells whether a clean path is folder or is below it.
func within(p, folder string) bool {
	folder = path.Clean(folder)
	return p == folder || folder == "/" || strings.HasPrefix(p, folder+"/")
}
