package config

import (
	"cmp"
	"slices"
	"strings"
)

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
func sectionAt(sections []section, line int) *section {
	at := 0
	for i, s := range sections {
		if s.line <= line && s.text != "" {
			at = i
		}
	}
	return &sections[at]
}

// repair takes out what is not TOML, at most most times, and says what it was: one line
// where only that line can be wrong, else the whole section.
func (s *section) repair(most int) []broken {
	var found []broken
	for len(found) < most {
		_, wrong := decode(s.text)
		if wrong == nil {
			break
		}
		lines := slices.Collect(strings.Lines(s.text))
		first, last := s.second(wrong.twice)
		if first > 0 {
			wrong.line = first
		}
		at := min(max(wrong.line, 1), len(lines)) - 1
		if strings.TrimSpace(lines[at]) == "" {
			wrong.open, wrong.problem, wrong.hint = true, "is not valid TOML: something above does not end", "look for a missing quote or bracket"
		}
		found = append(found, s.place(wrong))
		if at == 0 && s.header() != nil || wrong.open || strings.Contains(s.text, `"""`) || strings.Contains(s.text, "'''") {
			s.empty()
			break
		}
		for i := at; i < min(max(at+1, last), len(lines)); i++ {
			lines[i] = strings.Repeat("\n", strings.Count(lines[i], "\n"))
		}
		s.text = strings.Join(lines, "")
	}
	return found
}

// second finds the lines, from 1, of the second value that a key is given in the section;
// 0 if there is none. The parser's own place can be where that value ends.
func (s *section) second(key string) (first, last int) {
	if key == "" {
		return 0, 0
	}
	in := &scanner{data: s.text, line: 1}
	table := s.header()
	if table != nil {
		in.skipTo("\n")
	}
	for known := false; ; {
		in.skipBlank()
		start := in.pos
		first = in.here()
		parts := slices.Concat(table, (&scanner{data: s.text[start:]}).key())
		in.assignment(nil, false)
		switch again := keyString(parts...) == key; {
		case again && known:
			return first, in.here()
		case in.pos == start:
			return 0, 0
		case again:
			known = true
		}
	}
}

// empty leaves nothing of the section but its line ends.
func (s *section) empty() { s.text = strings.Repeat("\n", strings.Count(s.text, "\n")) }

// header is the key in the section's first line, nil if it is before all tables.
func (s *section) header() []string {
	header, isTable := strings.CutPrefix(strings.TrimLeft(s.text, " \t"), "[")
	if !isTable {
		return nil
	}
	return (&scanner{data: strings.TrimPrefix(header, "[")}).key()
}

// place completes what is known of a mistake whose line counts from the section's first:
// the key, what would be right for it, and whose table it is in.
func (s *section) place(wrong *broken) broken {
	b := *wrong
	path := s.header()
	lines := slices.Collect(strings.Lines(s.text))
	if b.line = max(b.line, 1); b.line <= len(lines) && (b.line > 1 || path == nil) {
		line := &scanner{data: lines[b.line-1]}
		if key := line.key(); line.peek() == '=' {
			path = append(path, key...)
			b.hint = cmp.Or(b.hint, want(path))
		}
	}
	if len(path) > 0 && path[0] != "" {
		b.key = cmp.Or(b.key, keyString(path...))
	}
	if len(path) > 1 && path[0] == "driver" {
		b.driver = path[1]
	}
	b.line += s.line - 1
	return b
}
