package config

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// setting is a key of a table with its value. Fields may be added, but not renamed.
type setting struct {
	key   string
	Value any    `json:"value"` // a string (also for a duration), a boolean or a list of strings
	From  string `json:"from"`  // FILE:LINE, or "default"
}

func settings[T any](r *Result, t T, fields []field[T], path ...string) []setting {
	out := make([]setting, len(fields))
	for i, f := range fields {
		value := f.get(t)
		if d, ok := value.(time.Duration); ok {
			value = d.String()
		}
		out[i] = setting{f.key, value, r.Origin(keyString(path...) + "." + f.key)}
	}
	return out
}

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
	showTable(b, settings(r, r.Config.Kubelet, kubeletFields(), "kubelet"), "kubelet")
	showTable(b, settings(r, r.Config.Log, logFields(), "log"), "log")
	for _, d := range r.Config.Drivers {
		showTable(b, settings(r, d, driverFields(), "driver", d.Name), "driver", d.Name)
	}
	b.Flush() // to memory
	return text.String()
}

// showTable writes a table with aligned columns.
func showTable(b *tabwriter.Writer, table []setting, path ...string) {
	fmt.Fprintf(b, "\n[%s]\n", keyString(path...))
	for _, s := range table {
		from := s.From
		if from != "default" {
			from = "from " + from
		}
		fmt.Fprintf(b, "%s\t= %s \t# %s\n", s.key, literal(s.Value), from)
	}
}

// Document is the JSON form of a Result. Fields may be added, but not renamed; no list is null.
type Document struct {
	Files   []string                      `json:"files"`
	Hidden  []Hidden                      `json:"hidden"`
	Kubelet map[string]setting            `json:"kubelet"` // by key
	Log     map[string]setting            `json:"log"`
	Driver  map[string]map[string]setting `json:"driver"` // by name
	Faulty  []string                      `json:"faulty"` // drivers left out for an error
	Errors  []Error                       `json:"errors"`
}

// Document returns the merged configuration as in the files, each value with its origin.
func (r *Result) Document() Document {
	doc := Document{
		Files:   append([]string{}, r.Files...), // [], not null
		Hidden:  append([]Hidden{}, r.Hidden...),
		Kubelet: shownTable(settings(r, r.Config.Kubelet, kubeletFields(), "kubelet")),
		Log:     shownTable(settings(r, r.Config.Log, logFields(), "log")),
		Driver:  make(map[string]map[string]setting, len(r.Config.Drivers)),
		Faulty:  append([]string{}, r.Faulty...),
		Errors:  append([]Error{}, r.Errors...),
	}
	for _, d := range r.Config.Drivers {
		doc.Driver[d.Name] = shownTable(settings(r, d, driverFields(), "driver", d.Name))
	}
	return doc
}

func shownTable(table []setting) map[string]setting {
	out := make(map[string]setting, len(table))
	for _, s := range table {
		out[s.key] = s
	}
	return out
}
