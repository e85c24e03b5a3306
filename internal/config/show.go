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
		b.WriteString("# Left out for its mistakes: " + keyString("driver", name) + "\n")
	}
	b.WriteByte('\n')
	writeTOML(b, r.Config, func(key string) string {
		if origin := r.Origin(key); origin != "default" {
			return "from " + origin
		}
		return "default"
	})
	if err := b.Flush(); err != nil {
		return fmt.Errorf("cannot show the configuration: %w", err)
	}
	return nil
}

// writeTOML writes a configuration, each value with a comment unless comment is nil.
// Writing errors come out when b is flushed.
func writeTOML(b *bufio.Writer, c *Config, comment func(key string) string) {
	writeTable(b, c.Kubelet, kubeletFields(), comment, "kubelet")
	b.WriteByte('\n')
	writeTable(b, c.Log, logFields(), comment, "log")
	for _, d := range c.Drivers {
		b.WriteByte('\n')
		writeTable(b, d, driverFields(nil), comment, "driver", d.Name)
	}
}

func writeTable[T any](b *bufio.Writer, t T, fields []field[T], comment func(key string) string, path ...string) {
	fmt.Fprintf(b, "[%s]\n", keyString(path...))
	keyWidth, valueWidth := 0, 0
	for _, f := range fields {
		keyWidth = max(keyWidth, len(f.key))
		valueWidth = max(valueWidth, utf8.RuneCountInString(literal(f.get(t))))
	}
	for _, f := range fields {
		value := literal(f.get(t))
		fmt.Fprintf(b, "%-*s = %s", keyWidth, f.key, value)
		if comment != nil {
			b.WriteString(strings.Repeat(" ", valueWidth-utf8.RuneCountInString(value)) + "  # " + comment(keyString(below(path, f.key)...)))
		}
		b.WriteByte('\n')
	}
}

// shownValue is a value in the JSON form.
type shownValue struct {
	Value any    `json:"value"` // a string (also for a duration), a boolean or a list of strings
	From  string `json:"from"`  // FILE:LINE, or "default"
}

// shownResult is the JSON form. Fields are added, never renamed.
type shownResult struct {
	Files    []string                         `json:"files"`
	Hidden   []Hidden                         `json:"hidden"`
	Kubelet  map[string]shownValue            `json:"kubelet"` // by key
	Log      map[string]shownValue            `json:"log"`
	Driver   map[string]map[string]shownValue `json:"driver"` // by name
	Faulty   []string                         `json:"faulty"` // drivers left out for their mistakes
	Mistakes []Mistake                        `json:"mistakes"`
	Warnings []Mistake                        `json:"warnings"`
}

// ShowJSON writes the merged configuration as a JSON document: the tables as in the
// files, each value as {"value": …, "from": "FILE:LINE" or "default"}; beside them
// "files", "hidden", "faulty", "mistakes" and "warnings", which are lists and never absent.
func (r *Result) ShowJSON(w io.Writer) error {
	doc := shownResult{
		Files:    orEmpty(r.Files),
		Hidden:   orEmpty(r.Hidden),
		Kubelet:  shownTable(r, r.Config.Kubelet, kubeletFields(), "kubelet"),
		Log:      shownTable(r, r.Config.Log, logFields(), "log"),
		Driver:   make(map[string]map[string]shownValue, len(r.Config.Drivers)),
		Faulty:   orEmpty(r.Faulty),
		Mistakes: orEmpty(r.Mistakes),
		Warnings: orEmpty(r.Warnings),
	}
	for _, d := range r.Config.Drivers {
		doc.Driver[d.Name] = shownTable(r, d, driverFields(nil), "driver", d.Name)
	}
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(doc); err != nil {
		return fmt.Errorf("cannot show the configuration: %w", err)
	}
	return nil
}

func shownTable[T any](r *Result, t T, fields []field[T], path ...string) map[string]shownValue {
	out := make(map[string]shownValue, len(fields))
	for _, f := range fields {
		v := f.get(t)
		if d, ok := v.(time.Duration); ok {
			v = span(d)
		}
		out[f.key] = shownValue{v, r.Origin(keyString(below(path, f.key)...))}
	}
	return out
}

// orEmpty makes a list of none an empty list: [] in JSON, not null.
func orEmpty[S ~[]E, E any](s S) []E {
	if s == nil {
		return []E{}
	}
	return s
}
