// Package safetext makes untrusted strings harmless: with it, text of a driver, a kubelet or a file
// can be written to a log, a terminal or a metric. It also builds the commands that users are told
// to run.
package safetext

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const ellipsis = '…'

// Clean returns s in a form that cannot move a cursor, end a line, reorder or hide text, or fill a
// screen. Every character that is not visible on its own (control characters, line breaks, NUL,
// bidi and zero-width marks, unusual spaces, characters unknown to Unicode) and every byte that is
// not UTF-8 becomes a visible escape as in Go: \n, \x00, \u202e. Letters of all scripts stay.
//
// The result has at most limit characters; if it was cut, the last one is an ellipsis. Clean of its
// own result with the same limit changes nothing: a backslash is not escaped, so an escape may also
// be part of the input, which is harmless.
func Clean(s string, limit int) string {
	if limit <= 0 {
		return ""
	}
	if len(s) <= limit && printable(s) { // the usual case, without a copy
		return s
	}
	var b strings.Builder
	length := 0 // characters in b
	room := 0   // bytes of b up to which an ellipsis still fits
	for s != "" {
		r, size := utf8.DecodeRuneInString(s)
		piece := s[:size]
		if (r == utf8.RuneError && size == 1) || !visible(r) {
			piece = strings.Trim(strconv.QuoteToASCII(piece), `"`)
		}
		s = s[size:]
		length += utf8.RuneCountInString(piece)
		if length > limit {
			return b.String()[:room] + string(ellipsis)
		}
		b.WriteString(piece)
		if length < limit {
			room = b.Len()
		}
	}
	return b.String()
}

// printable reports whether every character of s is visible.
func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !visible(r) })
}

// visible reports whether r is visible on its own. IsPrint excludes all controls, formats (bidi,
// zero-width), separators and unknown characters; a few letters and marks that are drawn as nothing
// are excluded as well.
func visible(r rune) bool {
	return unicode.IsPrint(r) &&
		!unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}
