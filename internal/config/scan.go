package config

import (
	"strconv"
	"strings"
)

// maxDepth is how deep keys are followed. No key of ours has more parts than three; the
// fourth is for hints.
const maxDepth = 4

// spot is where a key is in a file, and its value as it was written.
type spot struct {
	line     int
	text     string // the value; empty for the header of a table
	elements []int  // the lines of the elements, if the value is a list
	named    bool   // the key is named here, not only a longer one that begins with it
}

// spots finds the keys of a document by their parts.
type spots map[string]spot

func (s spots) find(parts []string) spot { return s[spotKey(parts)] }

func spotKey(parts []string) string {
	quoted := make([]string, len(parts))
	for i, p := range parts {
		quoted[i] = quote(p)
	}
	return strings.Join(quoted, ".")
}

// scan finds where the keys of a document are. The TOML package does not tell that of
// values that it decoded. The document must be one that it takes: what is valid is not
// checked again here, and of anything else the result means nothing (but it ends).
func scan(data string) spots {
	s := &scanner{data: data, line: 1, spots: make(spots)}
	var table []string
	for {
		s.skipBlank()
		switch s.peek() {
		case 0:
			return s.spots
		case '[':
			s.pos++
			s.eat('[')
			line := s.here()
			table = s.key()
			s.note(table, spot{line: line, named: true})
			s.eat(']')
			s.eat(']')
		default:
			before := s.pos
			s.assignment(table, true)
			if s.pos == before {
				s.pos++
			}
		}
	}
}

type scanner struct {
	data  string
	pos   int
	line  int // of lined
	lined int
	spots spots
}

// peek is the next byte, 0 at the end.
func (s *scanner) peek() byte {
	if s.pos < len(s.data) {
		return s.data[s.pos]
	}
	return 0
}

func (s *scanner) eat(c byte) {
	if s.peek() == c {
		s.pos++
	}
}

// here is the line of the next byte.
func (s *scanner) here() int {
	end := min(s.pos, len(s.data))
	if end > s.lined {
		s.line += strings.Count(s.data[s.lined:end], "\n")
		s.lined = end
	}
	return s.line
}

// note remembers where a key is. The place that names it counts more than one that names
// only a key below it, else the first.
func (s *scanner) note(parts []string, at spot) {
	if len(parts) == 0 {
		return
	}
	for n := range min(len(parts), maxDepth) {
		k, whole := spotKey(parts[:n+1]), n+1 == len(parts)
		old, known := s.spots[k]
		switch {
		case whole && !(known && old.named):
			s.spots[k] = at
		case !whole && !known:
			s.spots[k] = spot{line: at.line}
		}
	}
}

// skipBlank goes on to the next byte that is neither space, line end nor comment.
func (s *scanner) skipBlank() {
	for s.pos < len(s.data) {
		switch s.data[s.pos] {
		case ' ', '\t', '\r', '\n':
			s.pos++
		case '#':
			s.skipTo("\n")
		default:
			return
		}
	}
}

// skipTo goes on to the next byte that is one of stop.
func (s *scanner) skipTo(stop string) {
	if n := strings.IndexAny(s.data[s.pos:], stop); n >= 0 {
		s.pos += n
	} else {
		s.pos = len(s.data)
	}
}

func (s *scanner) skipSpace() {
	for s.peek() == ' ' || s.peek() == '\t' {
		s.pos++
	}
}

// assignment reads "key = value" in a table. Where the table is an element of a list,
// its keys are not noted.
func (s *scanner) assignment(table []string, noted bool) {
	line := s.here()
	parts := append(table[:len(table):len(table)], s.key()...)
	s.eat('=')
	s.skipSpace()
	start := s.pos
	elements := s.value(parts, noted)
	if noted {
		s.note(parts, spot{line: line, text: strings.TrimSpace(s.data[start:s.pos]), elements: elements, named: true})
	}
}

// key reads a key of one or more parts and the space around it.
func (s *scanner) key() []string {
	var parts []string
	for {
		s.skipSpace()
		switch s.peek() {
		case '"', '\'':
			parts = append(parts, s.quoted())
		default:
			start := s.pos
			for s.pos < len(s.data) && bare(s.data[s.pos:s.pos+1]) {
				s.pos++
			}
			parts = append(parts, s.data[start:s.pos])
		}
		s.skipSpace()
		if s.peek() != '.' {
			return parts
		}
		s.pos++
	}
}

// value passes over a value. Of a list it gives the lines of the elements.
func (s *scanner) value(parts []string, noted bool) []int {
	switch s.peek() {
	case '"', '\'':
		s.quoted()
	case '[':
		s.pos++
		var elements []int
		for s.next(']') {
			elements = append(elements, s.here())
			s.value(nil, false)
		}
		return elements
	case '{':
		s.pos++
		for s.next('}') {
			s.assignment(parts, noted)
		}
	default:
		s.skipTo(",]}#\r\n")
	}
	return nil
}

// next goes on to the next element of a list or inline table. There is none when it
// finds the end, which it passes over.
func (s *scanner) next(end byte) bool {
	for {
		s.skipBlank()
		switch s.peek() {
		case 0:
			return false
		case end:
			s.pos++
			return false
		case ',', '=', ']', '}':
			s.pos++ // '=' and the wrong end only in what is not TOML: go on
		default:
			return true
		}
	}
}

// quoted reads a string of any of the four kinds.
func (s *scanner) quoted() string {
	mark := s.data[s.pos : s.pos+1]
	if long := strings.Repeat(mark, 3); strings.HasPrefix(s.data[s.pos:], long) {
		mark = long
	}
	s.pos += len(mark)
	start := s.pos
	for s.pos < len(s.data) {
		switch rest := s.data[s.pos:]; {
		case mark[0] == '"' && rest[0] == '\\':
			s.pos = min(s.pos+2, len(s.data))
		case strings.HasPrefix(rest, mark):
			// A long string may end in one or two more of the same mark.
			if len(mark) == 3 && strings.HasPrefix(rest[1:], mark) {
				s.pos++
				continue
			}
			text := s.data[start:s.pos]
			s.pos += len(mark)
			if mark == `"` {
				return unescape(text)
			}
			return text
		default:
			s.pos++
		}
	}
	return s.data[start:]
}

// unescape undoes the escapes of a basic string. Keys are never long strings, so line
// ends need no care.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		i++
		digits := 0
		switch c := s[i]; c {
		case 'b':
			b.WriteByte('\b')
		case 't':
			b.WriteByte('\t')
		case 'n':
			b.WriteByte('\n')
		case 'f':
			b.WriteByte('\f')
		case 'r':
			b.WriteByte('\r')
		case 'e':
			b.WriteByte(0x1b)
		case 'x':
			digits = 2
		case 'u':
			digits = 4
		case 'U':
			digits = 8
		default:
			b.WriteByte(c)
		}
		if digits > 0 && i+digits < len(s) {
			if r, err := strconv.ParseUint(s[i+1:i+1+digits], 16, 32); err == nil {
				b.WriteRune(rune(r))
			}
			i += digits
		}
	}
	return b.String()
}
