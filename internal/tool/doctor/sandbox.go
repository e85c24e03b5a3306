package doctor

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
)

// sandbox checks that the daemon may write below the kubelet's root directory.
func (x *diagnosis) sandbox(p map[string]string) {
	root := x.config.Config.Kubelet.RootDir
	shown := safetext.Word(root)
	dir, setting := rootdir.Hider(root)
	hidden := rootdir.Hides(p[setting])
	writable := p["ProtectSystem"] != "strict" || slices.ContainsFunc(strings.Fields(p["ReadWritePaths"]), func(w string) bool {
		return rootdir.Within(rootdir.PluginsRegistry(root), strings.Trim(strings.TrimLeft(w, "-+"), `"`))
	})
	found := fmt.Sprintf("%s sees the plugins_registry below %s read-only: its ReadWritePaths= are %s", serviceUnit, shown, safetext.Quote(p["ReadWritePaths"]))
	expected := "ReadWritePaths= has the plugins_registry below the kubelet's root directory"
	if hidden {
		found = fmt.Sprintf("%s does not see %s: it has its own empty %s (%s=%s)", serviceUnit, shown, dir, setting, p[setting])
		expected = setting + "=no, and " + expected
	}
	fix := installDropIn(root)
	if above := hiddenAbove(p["InaccessiblePaths"], path.Clean(root)); above != "" {
		found = fmt.Sprintf("%s does not see %s: %s is hidden from it (InaccessiblePaths=)", serviceUnit, shown, safetext.Word(above))
		expected = "no InaccessiblePaths= above the kubelet's root directory: ReadWritePaths= cannot open what is below"
		fix = []Fix{note("give the kubelet a root directory elsewhere, or see nodes.md for how to open %s and what else is in it", safetext.ShellWord(above))}
		hidden = true
	}
	switch {
	case writable && !hidden:
		x.checked("", "sandbox", OK, "the daemon may write below %s", shown)
	default:
		x.finding("", "sandbox", "root-dir-not-writable", found, expected, fix...)
	}
}

// hiddenAbove returns a directory of a list of InaccessiblePaths= that contains a path, or "".
func hiddenAbove(list, p string) string {
	for _, word := range strings.Fields(list) {
		if dir := strings.TrimLeft(word, "-+"); rootdir.Within(p, dir) {
			return dir
		}
	}
	return ""
}

// hiddenSockets reports sockets of drivers in directories that the unit's sandbox hides or
// replaces, such as /tmp.
func (x *diagnosis) hiddenSockets(ctx context.Context, p map[string]string) {
	_, fixed := rootdir.Hider(x.config.Config.Kubelet.RootDir) // by the fix of sandbox
	for _, d := range x.config.Config.Drivers {
		above := hiddenAbove(p["InaccessiblePaths"], d.Socket)
		if d.Enabled && x.selected(d.Name) && above != "" && !rootdir.Within(x.config.Config.Kubelet.RootDir, above) {
			set, fix := x.dropIns(ctx, serviceUnit)
			x.finding(d.Name, "sandbox", "driver-socket-hidden", fmt.Sprintf("the socket %s is in %s, which InaccessiblePaths= hides from the daemon%s", safetext.Word(d.Socket), safetext.Word(above), set),
				"the daemon sees the socket", append(fix, systemctl("restart", serviceUnit))...)
			continue
		}
		dir, setting := rootdir.Hider(d.Socket)
		if d.Enabled && x.selected(d.Name) && rootdir.Hides(p[setting]) && setting != fixed {
			x.finding(d.Name, "sandbox", "driver-socket-hidden", fmt.Sprintf("the socket %s is in %s, and the daemon has its own empty %s (%s=%s)",
				safetext.Word(d.Socket), dir, dir, setting, p[setting]), "the driver's socket is in its own directory below /run or /var/lib",
				append([]Fix{note("or move the driver's socket, and leave the sandbox as it is")},
					writeDropIn(path.Join(path.Dir(rootdir.DropInFile), strings.ToLower(setting)+".conf"), "[Service]", setting+"=no")...)...)
		}
	}
}
