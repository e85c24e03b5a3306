package importer

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// image returns the name of the container's image, without its registry and tag.
func (c container) image() string {
	image, _, _ := strings.Cut(path.Base(c.Image), ":")
	return image
}

// hasFlag reports whether the command line has one of these flags, also where a shell runs it.
func (c container) hasFlag(names ...string) bool {
	return slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(arg string) bool {
		key, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		return strings.HasPrefix(arg, "-") && slices.Contains(names, key)
	})
}

// registrarName is the registrar's name among the controllers of the all-in-one sidecar.
const registrarName = "node-driver-registrar"

// controllers returns the sidecars in the all-in-one sidecar (KEP-4958); nil for other programs.
func (c container) controllers() []string {
	if list, found, err := c.flag("controllers"); err == nil && found && c.hasFlag("csi-address") {
		return strings.Split(list, ",")
	}
	return nil
}

// isRegistrar reports whether the container runs node-driver-registrar: by its controllers, image,
// name, the program it starts, or the flag that no other program has. The image can be a
// placeholder.
func (c container) isRegistrar() bool {
	if all := c.controllers(); all != nil {
		return slices.Contains(all, registrarName)
	}
	mentions := func(arg string) bool { return strings.Contains(arg, "-kubelet-registration-path") }
	return strings.Contains(c.image(), "node-driver-registrar") || strings.Contains(c.Name, "node-driver-registrar") ||
		len(c.Command) > 0 && strings.Contains(path.Base(c.Command[0]), "node-driver-registrar") ||
		slices.ContainsFunc(slices.Concat(c.Command, c.Args), mentions)
}

// pattern compiles on first use: the daemon is the same program, and never needs any of them.
func pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

var (
	probePattern  = pattern(`liveness-?probe`)
	othersPattern = pattern(`csi-(provisioner|attacher|resizer|snapshotter)|external-(provisioner|attacher|resizer|snapshotter|health)`)
	windowsPath   = pattern(`^(unix://)?[A-Za-z]:|\\`)
	reference     = pattern(`\$\$|\$\([^)]*\)`)
	placeholder   = pattern(`<[A-Za-z][\w-]*>`)
	listHead      = pattern(`^(apiVersion: v1|kind: List|\n)*$`)
	listTail      = pattern(`^kind: List\n(metadata:\n  resourceVersion: ""\n)?$`)
	alias         = pattern(`(?m)(^|[-:,\[{] +)\*`)
)

// isLivenessProbe reports whether the container runs the livenessprobe sidecar of CSI.
func (c container) isLivenessProbe() bool {
	probe := probePattern()
	return probe.MatchString(c.image()) || probe.MatchString(c.Name) ||
		c.hasFlag("csi-address") && c.hasFlag("probe-timeout", "health-port") && !c.isRegistrar() ||
		slices.Equal(c.controllers(), []string{"livenessprobe"})
}

// isSidecar reports whether the container runs beside a driver and uses its socket.
func (c container) isSidecar() bool {
	others := othersPattern()
	return c.isRegistrar() || c.isLivenessProbe() || c.controllers() != nil || others.MatchString(c.image()) ||
		others.MatchString(c.Name) && c.hasFlag("csi-address")
}
