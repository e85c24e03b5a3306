package config

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// setting is a key of a table with its value. Fields are added, never renamed.
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

// Show writes the merged configuration as TOML that could be a file of its own, each
// value with a comment that says where it comes from.
func (r *Result) Show(w io.Writer) error {
	b := bufio.NewWriter(w)
	if len(r.Files) == 0 {
		b.WriteString("# No configuration file: these are the defaults.\n")
	} else {
		b.WriteString("# From these files, in order:\n")
		for _, f := range r.Files {
			b.WriteString("#   " + printable(f) + "\n")
		}
	}
	for _, h := range r.Hidden {
		b.WriteString("# Hidden: " + printable(h.File) + ", by " + printable(h.By) + "\n")
	}
	for _, name := range r.Faulty {
		b.WriteString("# Left out for an error: " + keyString("driver", name) + "\n")
	}
	showTable(b, settings(r, r.Config.Kubelet, kubeletFields(), "kubelet"), "kubelet")
	showTable(b, settings(r, r.Config.Log, logFields(), "log"), "log")
	for _, d := range r.Config.Drivers {
		showTable(b, settings(r, d, driverFields(), "driver", d.Name), "driver", d.Name)
	}
	if err := b.Flush(); err != nil {
		return fmt.Errorf("cannot show the configuration: %w", err)
	}
	return nil
}

// showTable writes a table. Errors of writing come out when b is flushed.
func showTable(b *bufio.Writer, table []setting, path ...string) {
	fmt.Fprintf(b, "\n[%s]\n", keyString(path...))
	keyWidth, valueWidth := 0, 0
	for _, s := range table {
		keyWidth = max(keyWidth, len(s.key))
		valueWidth = max(valueWidth, utf8.RuneCountInString(literal(s.Value)))
	}
	for _, s := range table {
		value, from := literal(s.Value), s.From
		if from != "default" {
			from = "from " + from
		}
		fmt.Fprintf(b, "%-*s = %s%s  # %s\n", keyWidth, s.key, value,
			strings.Repeat(" ", valueWidth-utf8.RuneCountInString(value)), from)
	}
}

// shownResult is the JSON form. Fields are added, never renamed.
type shownResult struct {
	Files    []string                      `json:"files"`
	Hidden   []Hidden                      `json:"hidden"`
	Kubelet  map[string]setting            `json:"kubelet"` // by key
	Log      map[string]setting            `json:"log"`
	Driver   map[string]map[string]setting `json:"driver"` // by name
	Faulty   []string                      `json:"faulty"` // drivers left out for an error
	Errors   []Error                       `json:"errors"`
	Warnings []Error                       `json:"warnings"`
}

// ShowJSON writes the merged configuration as a JSON document: the tables as in the
// files, each value with its origin; beside them lists, which are never absent.
func (r *Result) ShowJSON(w io.Writer) error {
	doc := shownResult{
		Files:    append([]string{}, r.Files...), // [], not null
		Hidden:   append([]Hidden{}, r.Hidden...),
		Kubelet:  shownTable(settings(r, r.Config.Kubelet, kubeletFields(), "kubelet")),
		Log:      shownTable(settings(r, r.Config.Log, logFields(), "log")),
		Driver:   make(map[string]map[string]setting, len(r.Config.Drivers)),
		Faulty:   append([]string{}, r.Faulty...),
		Errors:   append([]Error{}, r.Errors...),
		Warnings: append([]Error{}, r.Warnings...),
	}
	for _, d := range r.Config.Drivers {
		doc.Driver[d.Name] = shownTable(settings(r, d, driverFields(), "driver", d.Name))
	}
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(doc); err != nil {
		return fmt.Errorf("cannot show the configuration: %w", err)
	}
	return nil
}

func shownTable(table []setting) map[string]setting {
	out := make(map[string]setting, len(table))
	for _, s := range table {
		out[s.key] = s
	}
	return out
}
