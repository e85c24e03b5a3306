package compat

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"csi-registrar/internal/config"
)

// WriteDropIns writes the TOML that replaces the registrars, with instructions in its
// comments. It has only what differs from the defaults. Several registrars make one valid
// file as well.
func WriteDropIns(w io.Writer, registrars []Registrar) error {
	var b strings.Builder
	write := func(key, value, byDefault string) {
		if value != byDefault {
			fmt.Fprintf(&b, "%s = %s\n", key, strconv.Quote(value))
		}
	}
	rootDir := config.Default().Kubelet.RootDir
	for i, r := range registrars {
		if i > 0 {
			b.WriteString("\n")
		}
		r.writeComments(&b)
		if r.RootDir != rootDir {
			rootDir = r.RootDir // once: a second table would be an error
			b.WriteString("\n# The root directory of the manifest's kubelet. The unit needs a drop-in for it:\n" +
				"# `csi-registrar config check` prints it.\n[kubelet]\n")
			write("root_dir", r.RootDir, "")
		}
		defaults := config.DefaultDriver(r.Driver.Name, r.Driver.Socket)
		fmt.Fprintf(&b, "\n[driver.%s]\n", strconv.Quote(r.Driver.Name))
		write("socket", r.Driver.Socket, "")
		write("endpoint", r.Driver.Endpoint, defaults.Endpoint)
		write("timeout", r.Driver.Timeout.String(), defaults.Timeout.String())
		write("socket_owner", r.Driver.SocketOwner, defaults.SocketOwner)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r Registrar) writeComments(b *strings.Builder) {
	list := func(items []string, format string) {
		for _, item := range items {
			fmt.Fprintf(b, format, item)
		}
	}
	fmt.Fprintf(b, "# Keeps %s registered instead of the node-driver-registrar of\n", r.Driver.Name)
	list(r.From, "#   %s\n")
	fmt.Fprintf(b, "# Save this as /etc/csi-registrar/conf.d/60-%s.toml, then remove from the manifest:\n", r.Driver.Name)
	list(r.Remove, "#   - %s\n")
	b.WriteString("# Until that is rolled out, `csi-registrar status` shows a conflict: the old one still registers it.\n")
	list(r.Comments, "# %s\n")
}
