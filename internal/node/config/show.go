package config

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"csi-registrar/internal/sys/safetext"
)

// Show returns the merged configuration as a valid TOML file, in which each value has a comment
// with its origin.
func (r *Result) Show() string {
	var text strings.Builder
	b := tabwriter.NewWriter(&text, 0, 0, 1, ' ', 0)
	if len(r.Files) == 0 {
		fmt.Fprintln(b, "# No configuration file: these are the defaults.")
	} else {
		fmt.Fprintln(b, "# From these files, in order:")
	}
	for _, f := range r.Files {
		fmt.Fprintln(b, "#  ", safetext.Word(f))
	}
	for _, h := range r.Hidden {
		fmt.Fprintf(b, "# Hidden: %s, by %s\n", safetext.Word(h.File), safetext.Word(h.By))
	}
	for _, name := range r.Faulty {
		fmt.Fprintln(b, "# Left out for an error:", keyString("driver", name))
	}
	showTable(b, r, r.Config.Kubelet, kubeletFields(), "kubelet")
	showTable(b, r, r.Config.Log, logFields(), "log")
	for _, d := range r.Config.Drivers {
		showTable(b, r, d, driverFields(), "driver", d.Name)
	}
	b.Flush() // to memory
	return text.String()
}

// showTable writes a table with aligned columns.
func showTable[T any](b *tabwriter.Writer, r *Result, t T, fields []field[T], path ...string) {
	table := keyString(path...)
	fmt.Fprintf(b, "\n[%s]\n", table)
	for _, f := range fields {
		from := r.Origin(table + "." + f.key)
		if from != "default" {
			from = "from " + from
		}
		fmt.Fprintf(b, "%s\t= %s \t# %s\n", f.key, literal(f.get(t)), from)
	}
}
