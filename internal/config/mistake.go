package config

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// Mistake is one thing that is wrong in one file, or that its reader should know.
type Mistake struct {
	File    string `json:"file"`
	Line    int    `json:"line,omitempty"` // from 1; 0: the file as a whole
	Key     string `json:"key,omitempty"`  // as TOML writes it: driver."nfs.csi.k8s.io".timeout
	Problem string `json:"problem"`        // what is wrong
	Hint    string `json:"hint,omitempty"` // what would be right
}

// String is "FILE:LINE: KEY: problem (hint)", without the parts that are not known. It
// is always one line of printable characters.
func (m Mistake) String() string {
	var b strings.Builder
	b.WriteString(place(m.File, m.Line))
	b.WriteString(": ")
	if m.Key != "" {
		b.WriteString(m.Key + ": ")
	}
	b.WriteString(m.Problem)
	if m.Hint != "" {
		b.WriteString(" (" + m.Hint + ")")
	}
	return b.String()
}

// place writes where something is in a file.
func place(file string, line int) string {
	file = printable(file)
	if line > 0 {
		return file + ":" + strconv.Itoa(line)
	}
	return file
}

// Mistakes is a list of mistakes that can be returned as an error.
type Mistakes []Mistake

// Error has one mistake a line, in the order of the files, then of the lines.
func (ms Mistakes) Error() string {
	lines := make([]string, len(ms))
	for i, m := range ms {
		lines[i] = m.String()
	}
	return strings.Join(lines, "\n")
}

// Err is the list as an error, nil if it is empty: a nil Mistakes in an error is not a
// nil error.
func (ms Mistakes) Err() error {
	if len(ms) == 0 {
		return nil
	}
	return ms
}

// sortMistakes puts them in the order of files, then of lines.
func sortMistakes(ms []Mistake, rank map[string]int) []Mistake {
	slices.SortStableFunc(ms, func(a, b Mistake) int {
		return cmp.Or(cmp.Compare(rank[a.File], rank[b.File]), strings.Compare(a.File, b.File),
			cmp.Compare(a.Line, b.Line), strings.Compare(a.Key, b.Key))
	})
	return ms
}
