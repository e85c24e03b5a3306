package compat

import (
	"path"
	"regexp"
	"slices"
	"strings"
)

// image returns the name of the container's image, without its registry, tag and digest.
func (c container) image() string {
	image, _, _ := strings.Cut(c.Image, "@")
	image, _, _ = strings.Cut(path.Base(image), ":")
	return image
}

// hasFlag reports whether the command line has one of these flags, also where a shell runs it.
func (c container) hasFlag(names ...string) bool {
	return slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(arg string) bool {
		key, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		return strings.HasPrefix(arg, "-") && slices.Contains(names, key)
	})
}

// isRegistrar reports whether the container runs node-driver-registrar: by its image, its name, the
// program it starts, or the flag that no other program has. An image may be a placeholder.
func (c container) isRegistrar() bool {
	mentions := func(arg string) bool { return strings.Contains(arg, "-kubelet-registration-path") }
	return strings.Contains(c.image(), "node-driver-registrar") || strings.Contains(c.Name, "node-driver-registrar") ||
		len(c.Command) > 0 && strings.Contains(path.Base(c.Command[0]), "node-driver-registrar") ||
		slices.ContainsFunc(slices.Concat(c.Command, c.Args), mentions)
}

// isLivenessProbe reports whether the container runs the livenessprobe sidecar of CSI.
func (c container) isLivenessProbe() bool {
	probe := regexp.MustCompile(`liveness-?probe`)
	return probe.MatchString(c.image()) || probe.MatchString(c.Name) ||
		c.hasFlag("csi-address") && c.hasFlag("probe-timeout", "health-port") && !c.isRegistrar()
}

// isSidecar reports whether the container runs beside a driver and uses its socket.
func (c container) isSidecar() bool {
	others := regexp.MustCompile(`csi-(provisioner|attacher|resizer|snapshotter)|external-(provisioner|attacher|resizer|snapshotter|health)`)
	return c.isRegistrar() || c.isLivenessProbe() || others.MatchString(c.image()) ||
		others.MatchString(c.Name) && c.hasFlag("csi-address")
}
