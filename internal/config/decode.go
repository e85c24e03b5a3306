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
	maxDots     = 100    // in a line
)

// document is a file that is valid TOML.
type document struct {
	text string
	md   toml.MetaData
	root map[string]toml.Primitive
	tree map[string]any // string, int64, float64, bool, time.Time, []any, map[string]any, []map[string]any
}

// parse reads a document. The error has neither file nor key.
func parse(text string) (*document, *Error) {
	text = strings.TrimLeft(text, "\ufeff") // as the parser does, however many there are
	if e := unreasonable(text); e != nil {
		return nil, e
	}
	d := &document{text: text}
	err := d.decode()
	if err == nil {
		return d, nil
	}
	syntax, ok := errors.AsType[toml.ParseError](err)
	if !ok {
		return nil, &Error{Problem: "cannot be understood: " + clean(err.Error())}
	}
	return nil, &Error{Line: d.lineAt(syntax.Position), Problem: "is not valid TOML: " + clean(syntax.Message), Hint: syntaxHint(syntax.Message)}
}

// unreasonable says why a text is better not given to the parser, nil if it may be.
func unreasonable(text string) *Error {
	brackets, number := 0, 0
	for line := range strings.Lines(text) {
		number++
		brackets += strings.Count(line, "[") + strings.Count(line, "{")
		if len(line) > maxLine || strings.Count(line, ".") > maxDots || brackets > maxBrackets {
			return &Error{Line: number, Problem: "is too long, or has too many dots or brackets", Hint: notOurs}
		}
	}
	return nil
}

const notOurs = "this is not a configuration file of csi-registrar"

func (d *document) decode() (err error) {
	// The parser panics where it finds a bug in itself. That must not end the daemon.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	if d.md, err = toml.Decode(d.text, &d.root); err != nil {
		return err
	}
	d.tree = make(map[string]any, len(d.root))
	for key, p := range d.root {
		var v any
		if err := d.md.PrimitiveDecode(p, &v); err != nil {
			return err
		}
		d.tree[key] = v
	}
	return nil
}

// line finds the line of a key of md.Keys. The library gives the position of a key only with
// an error about its value, so it is asked for one. That takes time in proportion to the
// file: it is for errors and for `config show`.
func (d *document) line(key toml.Key) int {
	p := d.root[key[0]]
	for _, part := range key[1:] {
		var table map[string]toml.Primitive
		if err := d.md.PrimitiveDecode(p, &table); err != nil {
			break // not a table: its line is the nearest
		}
		p = table[part]
	}
	if err, ok := errors.AsType[toml.ParseError](d.md.PrimitiveDecode(p, &refuser{})); ok {
		return d.lineAt(err.Position)
	}
	return 0
}

// refuser takes no value.
type refuser struct{}

func (*refuser) UnmarshalTOML(any) error { return errors.New("refused") }

// lineAt is the line of a position. Its own number is that of the end of a long value.
func (d *document) lineAt(p toml.Position) int {
	return 1 + strings.Count(d.text[:min(max(p.Start, 0), len(d.text))], "\n")
}

// syntaxHint says what would be right where the parser's message does not.
func syntaxHint(message string) string {
	for _, h := range [...]struct{ in, hint string }{
		{"cannot contain newlines", "the closing quote is missing"},
		{`expected '"'`, "the closing quote is missing"},
		{"array terminator", `a list is written ["1.0.0", "1.1.0"]`},
		{"expected '.' or '='", "a line is written key = value"},
		{"table name", `a table begins with [driver."NAME"]`},
		{"to end with a newline", "a string is in quotes"},
		{"expected value", "a string is in quotes; true and false are not"},
		{"invalid escape", `a backslash is written \\`},
		{"already been defined", "a key or table is written once in a file: leave one of them"},
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
