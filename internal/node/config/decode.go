package config

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/pelletier/go-toml/v2/unstable"

	"csi-registrar/internal/sys/safetext"
)

// maxLine is the longest line in bytes that the decoder gets: its time is cubic in the number of
// parts of a dotted key and of nested braces. No configuration file of ours has a longer line.
const maxLine = 4096

// document is a file that is valid TOML.
type document struct {
	// of string, int64, float64, bool, time.Time, []any, map[string]any and []map[string]any
	tree map[string]any
	keys []key // in the order of the file, tables too
}

// key is a key of a document.
type key struct {
	path []string // its first maxDepth parts
	line int
}

// parse reads a document. The error has neither file nor key.
func parse(text string) (*document, *Error) {
	text = strings.TrimPrefix(text, "\ufeff")
	number := 0
	for line := range strings.Lines(text) {
		if number++; len(line) > maxLine {
			return nil, &Error{Line: number, Problem: "is too long", Hint: "this is not a configuration file of csi-registrar"}
		}
	}
	d := &document{}
	invalid := func(line int, problem string) (*document, *Error) {
		return nil, &Error{Line: line, Problem: "is not valid TOML: " + safetext.Clean(problem, maxCause), Hint: "see the examples in csi-registrar.toml(5)"}
	}
	if err := decode(text, &d.tree); err != nil {
		if syntax, ok := errors.AsType[toml.ParseError](err); ok {
			// The error's own line number is that of the end of a long value.
			start := min(max(syntax.Position.Start, 0), len(text))
			return invalid(1+strings.Count(text[:start], "\n"), syntax.Message)
		}
		return invalid(0, err.Error())
	}
	// The decoder does not report the positions of values.
	r := &keyReader{document: d, text: text, line: 1}
	r.Reset([]byte(text))
	var table []string
	for r.NextExpression() {
		switch e := r.Expression(); e.Kind {
		case unstable.Table, unstable.ArrayTable:
			table = r.key(nil, e)
		case unstable.KeyValue:
			r.keyValue(table, e)
		}
	}
	if err := r.Error(); err != nil { // the two readers of TOML disagree
		offset := r.offset
		if e, ok := errors.AsType[*unstable.ParserError](err); ok && len(e.Highlight) > 0 {
			offset = int(r.Range(e.Highlight).Offset)
		}
		return invalid(1+strings.Count(text[:offset], "\n"), err.Error())
	}
	return d, nil
}

func decode(text string, tree *map[string]any) (err error) {
	// The decoder panics where it finds a bug in itself. That must not end the daemon.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	_, err = toml.Decode(text, tree)
	return err
}

// keyReader collects the keys of a document.
type keyReader struct {
	unstable.Parser
	*document
	text   string
	offset int // of the last key
	line   int // of offset
}

// maxDepth is the number of parts of the longest known key: driver."NAME".KEY.
const maxDepth = 3

// key notes the key of a node in a table and returns its path.
func (r *keyReader) key(table []string, n *unstable.Node) []string {
	path := slices.Clone(table)
	for it := n.Key(); it.Next() && len(path) < maxDepth; path = append(path, string(it.Node().Data)) {
		if len(path) == len(table) {
			at := int(it.Node().Raw.Offset)
			r.line += strings.Count(r.text[r.offset:at], "\n")
			r.offset = at
		}
	}
	r.keys = append(r.keys, key{path, r.line})
	return path
}

// keyValue notes a key of a table, and those of an inline table below it.
func (r *keyReader) keyValue(table []string, n *unstable.Node) {
	path := r.key(table, n)
	if v := n.Value(); v.Kind == unstable.InlineTable && len(path) < maxDepth {
		for it := v.Children(); it.Next(); {
			r.keyValue(path, it.Node())
		}
	}
}

// Error is an error in a file.
type Error struct {
	File    string
	Line    int    // from 1; 0: the file as a whole
	Key     string // as TOML writes it: driver."nfs.csi.k8s.io".timeout
	Problem string
	Hint    string // a valid value, or how to fix it
	Driver  string // the driver whose table it is in; empty: in none
	// Command is what root can run to fix it, after a look at File; zero: there is none.
	Command safetext.Command
}

// Error returns "FILE:LINE: KEY: problem (hint)" without the unknown parts, always as one line of
// printable characters.
func (e Error) Error() string {
	s := place(e.File, e.Line) + ": "
	if e.Key != "" {
		s += e.Key + ": "
	}
	s += e.Problem
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// place returns FILE:LINE.
func place(file string, line int) string {
	file = safetext.Word(file)
	if line > 0 {
		return file + ":" + strconv.Itoa(line)
	}
	return file
}

// Errors is a list of errors as one error.
type Errors []Error

// maxCause limits the characters of a message from another package.
const maxCause = 300

// Error returns one error in each line.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}
