// Package safetext makes untrusted strings harmless: with it, text of a driver, a kubelet or a file
// can be written to a log, a terminal or a metric. It also builds the commands that users are told
// to run, and formats numbers of things.
package safetext

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

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
			return b.String()[:room] + "…"
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

// Claim is a path, the name of a unit or an ID as another program reports it: the daemon to a
// command of root. It is no string, so that it cannot be used as one by accident; String returns it
// for people.
type Claim string

// String returns the claim as Word does; empty if it is empty.
func (c Claim) String() string {
	if c == "" {
		return ""
	}
	return Word(string(c))
}

// Checked returns the value if ok accepts it: compared with the configuration files, or with what
// the kernel and systemd say. Otherwise it is empty.
func (c Claim) Checked(ok func(value string) bool) string {
	if c == "" || !ok(string(c)) {
		return ""
	}
	return string(c)
}

// Command is a command that a user is told to run; the program never runs it. Arguments may be
// untrusted paths: String quotes them. The caller must first check a name (of a unit, of a driver)
// that becomes an argument (such as UnitName), because a quoted word can still be an
// option.
type Command struct {
	Name   string
	Args   []string
	Stdout string // the file that its output goes to; empty: the terminal
}

// Run returns the Command of a name and its arguments.
func Run(name string, args ...string) Command { return Command{Name: name, Args: args} }

// String returns the command as one line for a POSIX shell.
func (c Command) String() string {
	var b strings.Builder
	b.WriteString(ShellWord(c.Name))
	for _, a := range c.Args {
		b.WriteString(" " + ShellWord(a))
	}
	if c.Stdout != "" {
		b.WriteString(" > " + ShellWord(c.Stdout))
	}
	return b.String()
}

// ShellWord returns s as one word for a POSIX shell, with printable characters only. Others need
// the form $'…' of POSIX.1-2024. A shell without that form (dash) reads a dollar sign and a quoted
// text: the wrong word, but still one word, because there is no quote in it.
func ShellWord(s string) string {
	switch {
	case plain(s):
		return s
	case printable(s):
		return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
	}
	var b strings.Builder
	b.WriteString("$'")
	for s != "" {
		r, size := utf8.DecodeRuneInString(s)
		if r == '\'' || r == '\\' || r == utf8.RuneError || !visible(r) {
			for _, c := range []byte(s[:size]) {
				fmt.Fprintf(&b, `\%03o`, c)
			}
		} else {
			b.WriteRune(r)
		}
		s = s[size:]
	}
	return b.String() + "'"
}

const maxQuoted = 1000 // characters of an untrusted text in a message

// Quote returns an untrusted text in double quotes, cleaned by Clean, with at most a thousand
// characters. A quote or backslash in it is escaped, so that it cannot end the quoted part.
func Quote(s string) string {
	return `"` + Clean(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s), maxQuoted) + `"`
}

// Word is Quote for a path or a name: without the quotes if it is a single word that needs none.
func Word(s string) string {
	if plain(s) && len(s) <= maxQuoted {
		return s
	}
	return Quote(s)
}

// plain reports whether s is a word of characters without a special meaning to a shell or a reader.
func plain(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@%+,=") == "" &&
		!strings.HasPrefix(s, "=")
}

// Count formats a number and its noun.
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Some formats the first ones of a list.
func Some(list []string, shown int) string {
	if more := len(list) - shown; more > 0 {
		list = append(slices.Clone(list[:shown]), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(list, ", ")
}

// UnitName reports whether s is the name of a systemd unit (systemd.unit(5)) that can be an
// argument: it has only the characters of one, has a type, and cannot be read as an option.
func UnitName(s string) bool {
	dot := strings.LastIndexByte(s, '.')
	return len(s) <= 255 && dot > 0 &&
		slices.Contains([]string{"service", "scope", "socket", "mount", "slice", "target", "timer", "path"}, s[dot+1:]) &&
		strings.Trim(s, `abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\@`) == "" &&
		!strings.ContainsAny(s[:1], `-.\@:`)
}

// Pattern compiles a regular expression on first use: the daemon is the same program as the
// commands, and never needs theirs.
func Pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}
