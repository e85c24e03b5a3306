package importer

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/node/config"
)

// FileName returns the file name for the drop-in of these drivers.
func FileName(registrars []Registrar) string {
	if len(registrars) == 1 {
		return "60-" + registrars[0].Driver.Name + ".toml"
	}
	return "60-csi-drivers.toml"
}

// WriteDropIn writes the TOML that replaces registrars, with instructions in its comments. The
// tables have only the values that differ from the defaults.
func WriteDropIn(w io.Writer, registrars []Registrar, edits []Edits) error {
	if len(registrars) == 0 {
		return nil
	}
	var b strings.Builder
	writeInstructions(&b, registrars, edits)
	write := func(key, value, byDefault string) {
		if value != byDefault {
			fmt.Fprintf(&b, "%s = %s\n", key, strconv.Quote(value))
		}
	}
	// All registrars have the same root directory.
	if rootDir := registrars[0].RootDir; rootDir != config.Default().Kubelet.RootDir {
		b.WriteString("\n# The root directory of the manifest's kubelet. The unit needs a drop-in for it:\n" +
			"# `csi-registrar config check` prints it.\n[kubelet]\n")
		write("root_dir", rootDir, "")
	}
	for _, r := range registrars {
		b.WriteString("\n")
		for _, c := range r.Comments {
			fmt.Fprintf(&b, "# %s\n", c)
		}
		defaults := config.DefaultDriver(r.Driver.Name, r.Driver.Socket)
		fmt.Fprintf(&b, "[driver.%s]\n", strconv.Quote(r.Driver.Name))
		write("socket", r.Driver.Socket, "")
		write("endpoint", r.Driver.Endpoint, defaults.Endpoint)
		write("timeout", r.Driver.Timeout.String(), defaults.Timeout.String())
		write("when_limit_changes", string(r.Driver.WhenLimitChanges), string(defaults.WhenLimitChanges))
		write("socket_owner", string(r.Driver.SocketOwner), string(defaults.SocketOwner))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// writeInstructions writes where to save the file, and how to change the workloads of its
// registrars.
func writeInstructions(b *strings.Builder, registrars []Registrar, edits []Edits) {
	what := registrars[0].Driver.Name
	if len(registrars) > 1 {
		what = fmt.Sprintf("%d drivers", len(registrars))
	}
	fmt.Fprintf(b, "# Registers %s in place of node-driver-registrar.\n", what)
	fmt.Fprintf(b, "# Save this as /etc/csi-registrar/conf.d/%s. While node-driver-registrar runs,\n", FileName(registrars))
	b.WriteString("# `csi-registrar status` shows a conflict. Then change these workloads, and roll them out:\n")
	changed := map[string]bool{}
	for _, r := range registrars {
		for _, w := range r.Workloads {
			changed[w] = true
		}
	}
	var last []string
	for _, e := range edits {
		if !changed[e.Workload] {
			continue
		}
		if lines := e.Lines(); !slices.Equal(lines, last) {
			writeLines(b, last)
			b.WriteString("#\n")
			last = lines
		}
		fmt.Fprintf(b, "# %s\n", e.Workload)
	}
	writeLines(b, last)
}

func writeLines(b *strings.Builder, lines []string) {
	for _, line := range lines {
		fmt.Fprintf(b, "#   - %s\n", line)
	}
}
