package cli

import (
	"strings"

	"csi-registrar/internal/config"
)

// unitDropIn is what the unit needs for another root_dir than the kubelet's default: its
// sandbox leaves only that one writable. Empty for the default.
func unitDropIn(rootDir string) string {
	if rootDir == config.Default().Kubelet.RootDir {
		return ""
	}
	// systemd takes % for a specifier, and a space for the end of a path.
	path := `"` + strings.NewReplacer(`%`, `%%`, `\`, `\\`, `"`, `\"`).Replace(rootDir) + `"`
	return "# /etc/systemd/system/csi-registrar.service.d/root-dir.conf\n" +
		"[Unit]\nRequiresMountsFor=" + path + "\n" +
		"[Service]\nReadWritePaths=" + path + "\n"
}
