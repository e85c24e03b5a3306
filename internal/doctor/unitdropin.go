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
// service's own view of the file system is made.
func UnitDropIn(rootDir string) string {
	rootDir = path.Clean(rootDir)
	if rootDir == defaultRootDir {
		return ""
	}
	p := unitPath(rootDir)
	return "# " + unitDropInFile + "\n" +
		"[Unit]\nRequiresMountsFor=" + p + "\n\n[Service]\nReadWritePaths=-" + p + "\n"
}

// installUnitDropIn gives the commands that put UnitDropIn's lines in place.
func installUnitDropIn(rootDir string) []string {
	restart := []string{"systemctl daemon-reload", "systemctl restart " + serviceUnit}
	if UnitDropIn(rootDir) == "" {
		return append([]string{"rm -f " + unitDropInFile}, restart...)
	}
	p := unitPath(rootDir)
	return append([]string{
		"mkdir -p " + path.Dir(unitDropInFile),
		"printf '%s\\n' '[Unit]' " + shellQuote("RequiresMountsFor="+p) + " '[Service]' " + shellQuote("ReadWritePaths=-"+p) + " > " + unitDropInFile,
	}, restart...)
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
