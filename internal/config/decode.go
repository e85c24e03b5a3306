package config

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"csi-registrar/internal/safetext"

	"github.com/BurntSushi/toml"
)

// maxLine is the longest line, in bytes, that the parser gets: for a dotted key and for nested
// braces it takes the cube of their parts in time.
const maxLine = 4096

// document is a file that is valid TOML.
type document struct {
	text   string
	mu     sync.Mutex // the two below: looking up a line changes them, and a Result is read by many
	md     toml.MetaData
	tables map[string]map[string]toml.Primitive // by their keys; "" is the whole
	tree   map[string]any                       // string, int64, float64, bool, time.Time, []any, map[string]any, []map[string]any
}

// parse reads a document. The error has neither file nor key.
func parse(text string) (*document, *Error) {
	text = strings.TrimLeft(text, "\ufeff") // as the parser does, however many there are
	number := 0
	for line := range strings.Lines(text) {
		if number++; len(line) > maxLine {
			return nil, &Error{Line: number, Problem: "is too long", Hint: notOurs}
		}
	}
	d := &document{text: text}
	err := d.decode()
	if err == nil {
		return d, nil
	}
	syntax, ok := errors.AsType[toml.ParseError](err)
	if !ok {
		syntax.Message = err.Error()
	}
	return nil, &Error{Line: d.lineAt(syntax.Position), Problem: "is not valid TOML: " + safetext.Clean(syntax.Message, maxCause),
		Hint: "see the examples in csi-registrar.toml(5)"}
}

const notOurs = "this is not a configuration file of csi-registrar"

func (d *document) decode() (err error) {
	// The parser panics where it finds a bug in itself. That must not end the daemon.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	var root map[string]toml.Primitive
	if _, err = toml.Decode(d.text, &d.tree); err == nil {
		d.md, err = toml.Decode(d.text, &root)
	}
	d.tables = map[string]map[string]toml.Primitive{"": root}
	return err
}

// line finds the line of a key of md.Keys. The library gives the position of a key only with
// an error about its value, so it is asked for one. That takes time in proportion to the
// file: it is for errors and for `config show`.
func (d *document) line(key toml.Key) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	var refused toml.ParseError
	if !errors.As(d.md.PrimitiveDecode(d.primitive(key), &refuser{}), &refused) {
		return 0
	}
	return d.lineAt(refused.Position)
}

// primitive finds the value of a key; where there is none, in a list, that of the list.
func (d *document) primitive(key toml.Key) toml.Primitive {
	last := len(key) - 1
	if last == 0 {
		return d.tables[""][key[0]]
	}
	above := key[:last]
	table, known := d.tables[above.String()]
	if !known {
		p := d.primitive(above)
		if err := d.md.PrimitiveDecode(p, &table); err != nil {
			return p
		}
		d.tables[above.String()] = table
	}
	return table[key[last]]
}

// refuser takes no value.
type refuser struct{}

func (*refuser) UnmarshalTOML(any) error { return errors.New("refused") }

// lineAt is the line of a position. Its own number is that of the end of a long value.
func (d *document) lineAt(p toml.Position) int {
	return 1 + strings.Count(d.text[:min(max(p.Start, 0), len(d.text))], "\n")
}
