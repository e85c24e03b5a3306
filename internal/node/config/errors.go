package config

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/sys/safetext"
)

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

// sorted sorts errors by file and line, and removes repetitions.
func sorted(es []Error, rank map[string]int) []Error {
	slices.SortStableFunc(es, func(a, b Error) int {
		return cmp.Or(cmp.Compare(rank[a.File], rank[b.File]), strings.Compare(a.File, b.File),
			cmp.Compare(a.Line, b.Line), strings.Compare(a.Key, b.Key))
	})
	return slices.CompactFunc(es, func(a, b Error) bool { return a.Error() == b.Error() })
}
