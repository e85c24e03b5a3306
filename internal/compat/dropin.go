package compat

import (
	"fmt"
	"io"
	"strings"

	"csi-registrar/internal/config"
)

// FileName is the name for the drop-in that an admin would choose: 60 to 90 are theirs.
func (r Registrar) FileName() string { return "60-" + r.Driver.Name + ".toml" }

// WriteDropIns writes the TOML that takes the place of the registrars, with what to do in
// its comments. Only what differs from the defaults is in it. Several make one valid file
// as well.
func WriteDropIns(w io.Writer, registrars []Registrar) error {
	var b strings.Builder
	rootDir := config.Default().Kubelet.RootDir
	for i, r := range registrars {
		if i > 0 {
			b.WriteString("\n")
		}
		r.writeComments(&b)
		if r.RootDir != rootDir {
			rootDir = r.RootDir // once: a second table would be an error
			b.WriteString("\n# The manifest's kubelet lives here. The unit needs a drop-in for it:\n" +
				"# `csi-registrar config check` prints its lines.\n[kubelet]\n")
			fmt.Fprintf(&b, "root_dir = %s\n", config.Quote(r.RootDir))
		}
		r.writeTable(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r Registrar) writeComments(b *strings.Builder) {
	fmt.Fprintf(b, "# Keeps %s registered instead of the node-driver-registrar of\n", r.Driver.Name)
	for _, from := range r.From {
		fmt.Fprintf(b, "#   %s\n", from)
	}
	fmt.Fprintf(b, "# Save this as /etc/csi-registrar/conf.d/%s, then remove from the manifest:\n", r.FileName())
	for _, item := range r.Remove {
		fmt.Fprintf(b, "#   - %s\n", item)
	}
	b.WriteString("# Until that is rolled out, `csi-registrar status` shows a conflict: the old one still registers.\n")
	for _, c := range r.Comments {
		fmt.Fprintf(b, "# %s\n", c)
	}
}

func (r Registrar) writeTable(b *strings.Builder) {
	defaults := config.DefaultDriver(r.Driver.Name, r.Driver.Socket)
	fmt.Fprintf(b, "\n[driver.%s]\n", config.Quote(r.Driver.Name))
	fmt.Fprintf(b, "socket = %s\n", config.Quote(r.Driver.Socket))
	if r.Driver.Endpoint != defaults.Endpoint {
		fmt.Fprintf(b, "endpoint = %s\n", config.Quote(r.Driver.Endpoint))
	}
	if r.Driver.Timeout != defaults.Timeout {
		fmt.Fprintf(b, "timeout = %s\n", config.Quote(r.Driver.Timeout.String()))
	}
	if r.Driver.SocketOwner != defaults.SocketOwner {
		fmt.Fprintf(b, "socket_owner = %s\n", config.Quote(r.Driver.SocketOwner))
	}
}
