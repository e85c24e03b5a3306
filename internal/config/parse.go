package config

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/BurntSushi/toml"
)

// What the parser is spared. It takes stack for each open bracket, and for a dotted key
// the cube of its parts in time. No file of ours comes near.
const (
	maxBrackets = 50_000 // in a file
	maxLine     = 4096   // bytes
	maxDots     = 500    // in a line
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
	driver        string // the name of the driver that the part is about, if it is known
	twice         string // the key, if it is there a second time
	open          bool   // it is not sure that one line is wrong: something does not end
}

// parse reads a document. Where it is not TOML, each table that is wrong is named and
// left out, and the rest is read.
func parse(data string) (document, []broken) {
	data = strings.TrimLeft(data, "\ufeff") // as the parser does, however many there are
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
		found = append(found, sections[i].repair(maxSyntax-len(found))...)
	}
	for {
		left := join(sections)
		tree, wrong := decode(left)
		switch {
		case wrong == nil:
			return document{tree, scan(left)}, found
		case len(found) >= maxSyntax:
			return document{}, append(found, broken{
				problem: "has too many mistakes, the rest of the file was not read",
				hint:    "correct these first",
			})
		}
		// Each section is right, but not beside the others: a table is there twice.
		s := sectionAt(sections, wrong.line)
		wrong.line -= s.line - 1
		found = append(found, s.place(wrong))
		s.empty()
	}
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
		switch {
		case len(l) > maxLine:
			return &broken{line: line, problem: fmt.Sprintf("the line is longer than %d bytes", maxLine), hint: hint}
		case strings.Count(l, ".") > maxDots:
			return &broken{line: line, problem: fmt.Sprintf("the line has more than %d dots", maxDots), hint: hint}
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
		open:    strings.Contains(syntax.Message, "terminator") || strings.Contains(syntax.Message, "unexpected EOF"),
	}
	if key, found := strings.CutPrefix(syntax.Message, "Key '"); found {
		key, _, _ = strings.Cut(key, "' ")
		wrong.key = keyString((&scanner{data: key}).key()...)
		wrong.problem, wrong.hint, wrong.twice = "is in the file already", "leave one of them", wrong.key
	}
	return nil, wrong
}

// syntaxHint says what would be right where the parser's message does not.
func syntaxHint(message string) string {
	for _, h := range [...]struct{ in, hint string }{
		{"cannot contain newlines", "the closing quote is missing"},
		{`expected '"'`, "the closing quote is missing"},
		{"array terminator", `a list is written ["1.0.0", "1.1.0"]`},
		{"expected '.' or '='", "a line is written key = value"},
		{"table name", `a table begins with [driver."NAME"]`},
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
