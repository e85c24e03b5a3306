package config

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/BurntSushi/toml"
)

// What the parser is spared: it takes the square of a key's parts in time, and stack for
// each open bracket. No file of ours comes near.
const (
	maxLine     = 16 << 10 // bytes
	maxBrackets = 50_000   // in one file
)

// maxSyntax is how many mistakes of syntax are named in one file.
const maxSyntax = 20

// document is what a file says.
type document struct {
	tree  map[string]any // string, int64, float64, bool, time.Time, []any, map[string]any, []map[string]any
	spots spots
}

// broken is a part of a file that is not TOML.
type broken struct {
	line          int    // from 1; 0: not known
	key           string // as far as it is known
	problem, hint string
	drivers       []string // the names of the drivers that the part is about
}

// parse reads a document. Where it is not TOML, each table that is wrong is named and
// left out, and the rest is read.
func parse(data string) (document, []broken) {
	data = strings.TrimPrefix(data, "\ufeff")
	if b := unreasonable(data); b != nil {
		return document{}, []broken{*b}
	}
	tree, wrong := decode(data)
	if wrong == nil {
		return document{tree, scan(data)}, nil
	}
	sections := split(data)
	var found []broken
	for i := range sections {
		if _, wrong := decode(sections[i].text); wrong != nil {
			found = append(found, sections[i].drop(wrong))
		}
	}
	// What is left may still be wrong as a whole: a table is there twice.
	for len(found) < maxSyntax {
		left := join(sections)
		tree, wrong := decode(left)
		if wrong == nil {
			return document{tree, scan(left)}, found
		}
		at := sectionAt(sections, wrong.line)
		wrong.line -= sections[at].line - 1
		found = append(found, sections[at].drop(wrong))
	}
	return document{}, append(found[:maxSyntax], broken{
		problem: "has too many mistakes, the rest of the file was not read",
		hint:    "correct these first",
	})
}

// unreasonable tells why a file is better not given to the parser, nil if it may be.
func unreasonable(data string) *broken {
	const hint = "this is not a configuration file of csi-registrar"
	if strings.Count(data, "[")+strings.Count(data, "{") > maxBrackets {
		return &broken{problem: fmt.Sprintf("has more than %d brackets", maxBrackets), hint: hint}
	}
	line := 0
	for l := range strings.Lines(data) {
		line++
		if len(l) > maxLine {
			return &broken{line: line, problem: fmt.Sprintf("the line is longer than %d bytes", maxLine), hint: hint}
		}
	}
	return nil
}

// decode gives the document as a tree, or the first thing that is wrong with it.
func decode(data string) (tree map[string]any, wrong *broken) {
	// The parser panics where it finds a mistake in itself. That must not end the daemon.
	defer func() {
		if r := recover(); r != nil {
			tree, wrong = nil, &broken{problem: "cannot be understood: " + clean(fmt.Sprint(r))}
		}
	}()
	_, err := toml.Decode(data, &tree)
	if err == nil {
		return tree, nil
	}
	syntax, ok := errors.AsType[toml.ParseError](err)
	if !ok {
		return nil, &broken{problem: "cannot be understood: " + clean(err.Error())}
	}
	// Its own number of the line is one too high where a line ends too early.
	start := min(max(syntax.Position.Start, 0), len(data))
	wrong = &broken{
		line:    1 + strings.Count(data[:start], "\n"),
		problem: "is not valid TOML: " + clean(syntax.Message),
		hint:    syntaxHint(syntax.Message),
	}
	if key, found := strings.CutPrefix(syntax.Message, "Key '"); found {
		key, _, _ = strings.Cut(key, "' ")
		wrong.key = keyString((&scanner{data: key}).key()...)
		wrong.problem, wrong.hint = "is in the file already", "leave one of them"
	} else if syntax.LastKey != "" {
		wrong.key = keyString((&scanner{data: syntax.LastKey}).key()...)
	}
	return nil, wrong
}

// syntaxHint says what would be right where the parser's message does not.
func syntaxHint(message string) string {
	for _, h := range [...]struct{ in, hint string }{
		{"expected value but found", `put text in double quotes, as in "5s"`},
		{"cannot contain newlines", "the closing quote is missing"},
		{`expected '"'`, "the closing quote is missing"},
		{"array terminator", `a list is written ["1.0.0", "1.1.0"]`},
		{"expected '.' or '='", "a line is written key = value"},
		{"key separator", "a line is written key = value"},
		{"table name", `a table begins with [driver."nfs.csi.k8s.io"]`},
		{"invalid escape", `a backslash is written \\`},
		{"UTF-8", "save the file as UTF-8"},
	} {
		if strings.Contains(message, h.in) {
			return h.hint
		}
	}
	return ""
}

// clean puts s on one line of printable characters.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.TrimSpace(s))
}

// section is a part of a file: the header of a table and what follows it, or what is
// before the first header.
type section struct {
	line int // of its first line
	text string
}

// split cuts a file before each line that begins with a bracket. Such a line can also be
// part of a list in a list, or of a long string: no key of ours takes those.
func split(data string) []section {
	var sections []section
	first, line, start, end := 1, 0, 0, 0
	for l := range strings.Lines(data) {
		line++
		if strings.HasPrefix(strings.TrimLeft(l, " \t"), "[") {
			sections = append(sections, section{first, data[start:end]})
			first, start = line, end
		}
		end += len(l)
	}
	return append(sections, section{first, data[start:]})
}

// join puts the sections together again.
func join(sections []section) string {
	var b strings.Builder
	for _, s := range sections {
		b.WriteString(s.text)
	}
	return b.String()
}

// sectionAt finds the section of a line.
func sectionAt(sections []section, line int) int {
	at := 0
	for i, s := range sections {
		if s.line <= line && s.text != "" {
			at = i
		}
	}
	return at
}

// drop empties the section, but for its line ends, and says what is wrong with it. The
// line of wrong counts from the section's first one.
func (s *section) drop(wrong *broken) broken {
	b := *wrong
	b.line = max(b.line, 1) + s.line - 1
	if header, isTable := strings.CutPrefix(strings.TrimLeft(s.text, " \t"), "["); isTable {
		parts := (&scanner{data: strings.TrimPrefix(header, "[")}).key()
		if b.key == "" && parts[0] != "" {
			b.key = keyString(parts...)
		}
		b.drivers = driverOf(parts)
	} else {
		for l := range strings.Lines(s.text) {
			b.drivers = append(b.drivers, driverOf((&scanner{data: l}).key())...)
		}
	}
	s.text = strings.Repeat("\n", strings.Count(s.text, "\n"))
	return b
}

// driverOf is the name of the driver that a key is about, if it is about one.
func driverOf(parts []string) []string {
	if len(parts) > 1 && parts[0] == "driver" {
		return parts[1:2]
	}
	return nil
}
