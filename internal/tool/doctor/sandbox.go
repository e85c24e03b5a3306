package doctor

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	"csi-registrar/internal/node/distro"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
)

// sandbox checks that the daemon may write below the kubelet's root directory.
func (x *diagnosis) sandbox(p map[string]string) {
	root := x.config.Config.Kubelet.RootDir
	shown := safetext.Word(root)
	dir, setting := systemd.Hider(root)
	hidden := systemd.Hides(p[setting])
	writable := p["ProtectSystem"] != "strict" || slices.ContainsFunc(strings.Fields(p["ReadWritePaths"]), func(w string) bool {
		return systemd.Within(rootdir.PluginsRegistry(root), strings.Trim(strings.TrimLeft(w, "-+"), `"`))
	})
	found := fmt.Sprintf("%s sees the plugins_registry below %s read-only: its ReadWritePaths= are %s", serviceUnit, shown, safetext.Quote(p["ReadWritePaths"]))
	expected := "ReadWritePaths= has the plugins_registry below the kubelet's root directory"
	if hidden {
		found = fmt.Sprintf("%s does not see %s: it has its own empty %s (%s=%s)", serviceUnit, shown, dir, setting, p[setting])
		expected = setting + "=no, and " + expected
	}
	above, kept := hiddenAbove(p["InaccessiblePaths"], path.Clean(root))
	if above != "" {
		found = fmt.Sprintf("%s does not see %s: %s is hidden from it (InaccessiblePaths=)", serviceUnit, shown, safetext.Word(above))
		expected = "no InaccessiblePaths= above the kubelet's root directory: ReadWritePaths= cannot open what is below"
	}
	switch {
	case writable && !hidden && above == "":
		x.checked("", StepSandbox, OK, "the daemon may write below %s", shown)
	case above != "" && !x.problemIn(StepKubelet):
		fix := []Fix{note("or give the kubelet a root directory elsewhere: then the daemon does not see the keys in %s", safetext.ShellWord(above))}
		if !writable || hidden {
			fix = append(fix, installDropIn(root)...)
		}
		x.problem("", StepSandbox, RootDirNotWritable, found, expected,
			append(fix, mask(above, kept)...)...)
	case x.problemIn(StepKubelet): // the directory is wrong anyway
		x.checked("", StepSandbox, Problem, "%s", found)
	default:
		x.problem("", StepSandbox, RootDirNotWritable, found, expected, installDropIn(root)...)
	}
}

// inaccessibleFile has a name that sorts after those of other drop-ins, because it resets the list
// of InaccessiblePaths=.
const inaccessibleFile = "/etc/systemd/system/csi-registrar.service.d/zz-doctor-inaccessiblepaths.conf"

// mask returns a fix that replaces the list of InaccessiblePaths= with kept, which does not contain
// the directory above.
func mask(above string, kept []string) []Fix {
	for i, word := range kept {
		// systemctl shows this in place of a path with a space. In the drop-in systemd would ignore
		// it, and the path would no longer be hidden.
		if word == "[unprintable]" || strings.ContainsFunc(word, unicode.IsControl) {
			return []Fix{note("write InaccessiblePaths= and then all paths but %s into %s: those that are shown by",
				safetext.ShellWord(above), inaccessibleFile), run("systemctl", "--no-pager", "cat", serviceUnit)}
		}
		kept[i] = systemd.EscapePath(word)
	}
	return writeDropIn(inaccessibleFile, "[Service]", "InaccessiblePaths=", "InaccessiblePaths="+strings.Join(kept, " "))
}

// hiddenAbove returns the outermost directory of a list of InaccessiblePaths= that contains a path,
// or "" if there is none. It also returns the rest of the list, with all directories of keys that
// are known below the outermost one.
func hiddenAbove(list, p string) (above string, kept []string) {
	for _, word := range strings.FieldsFunc(list, func(r rune) bool { return r == ' ' }) {
		switch dir := strings.TrimLeft(word, "-+"); {
		case !systemd.Within(p, dir):
			kept = append(kept, word)
		case above == "" || systemd.Within(above, dir):
			above = dir
		}
	}
	for _, d := range distro.All() {
		for _, secret := range d.Secrets {
			word := "-" + secret
			if above != "" && systemd.Within(secret, above) && !systemd.Within(p, secret) && !slices.Contains(kept, word) {
				kept = append(kept, word)
			}
		}
	}
	return above, kept
}

// hiddenSockets reports sockets of drivers in directories that the unit's sandbox replaces, such
// as /tmp.
func (x *diagnosis) hiddenSockets(p map[string]string) {
	_, fixed := systemd.Hider(x.config.Config.Kubelet.RootDir) // by the fix of sandbox
	for _, d := range x.config.Config.Drivers {
		dir, setting := systemd.Hider(d.Socket)
		if d.Enabled && x.selected(d.Name) && systemd.Hides(p[setting]) && setting != fixed {
			x.problem(d.Name, StepSandbox, DriverSocketHidden, fmt.Sprintf("the socket %s is in %s, and the daemon has its own empty %s (%s=%s)",
				safetext.Word(d.Socket), dir, dir, setting, p[setting]), "the driver's socket is in its own directory below /run or /var/lib",
				append([]Fix{note("or move the driver's socket, and leave the sandbox as it is")},
					writeDropIn(path.Join(path.Dir(systemd.DropInFile), strings.ToLower(setting)+".conf"), "[Service]", setting+"=no")...)...)
		}
	}
}
