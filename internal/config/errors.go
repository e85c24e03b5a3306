package config

import (
	"cmp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"csi-registrar/internal/safetext"
)

// Error is one thing that is wrong in one file.
type Error struct {
	File    string `json:"file"`
	Line    int    `json:"line,omitempty"` // from 1; 0: the file as a whole
	Key     string `json:"key,omitempty"`  // as TOML writes it: driver."nfs.csi.k8s.io".timeout
	Problem string `json:"problem"`        // what is wrong
	Hint    string `json:"hint,omitempty"` // what would be right
}

// Error is "FILE:LINE: KEY: problem (hint)", without the parts that are not known. It is
// always one line of printable characters.
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

// place writes where something is in a file.
func place(file string, line int) string {
	file = safetext.Word(file)
	if line > 0 {
		return file + ":" + strconv.Itoa(line)
	}
	return file
}

// Errors is a list of errors that can be returned as one.
type Errors []Error

// maxCause is how many characters are shown of a message that is not ours.
const maxCause = 300

// Error has one error a line.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// sorted puts errors in the order of files, then of lines, and leaves out repetitions.
func sorted(es []Error, rank map[string]int) []Error {
	sort.SliceStable(es, func(i, j int) bool {
		a, b := &es[i], &es[j]
		return cmp.Or(cmp.Compare(rank[a.File], rank[b.File]), strings.Compare(a.File, b.File),
			cmp.Compare(a.Line, b.Line), strings.Compare(a.Key, b.Key)) < 0
	})
	return slices.Compact(es)
}
