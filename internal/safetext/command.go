package safetext

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Command is what a person is told to run. It is never run by the program itself. Arguments
// may be paths that a stranger chose: String quotes them. A name (of a unit, of a driver)
// that becomes an argument is checked by the caller first (UnitName, status.CheckName), for
// a quoted word can still be an option.
type Command struct {
	Name   string
	Args   []string
	Stdout string // the file that its output goes to; empty: the terminal
}

// Run returns the Command of a name and its arguments.
func Run(name string, args ...string) Command { return Command{Name: name, Args: args} }

// String writes the command as one line for a POSIX shell.
func (c Command) String() string {
	var b strings.Builder
	b.WriteString(ShellWord(c.Name))
	for _, a := range c.Args {
		b.WriteByte(' ')
		b.WriteString(ShellWord(a))
	}
	if c.Stdout != "" {
		b.WriteString(" > ")
		b.WriteString(ShellWord(c.Stdout))
	}
	return b.String()
}

// MarshalText writes it into a JSON document as String does.
func (c Command) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// ShellWord writes s as one word for a POSIX shell, of printable characters only. What is
// not printable needs the form $'…' of POSIX.1-2024. A shell that does not know that form
// (dash) reads a dollar and a quoted text: the wrong word, and still only one, because there
// is no quote within it.
func ShellWord(s string) string {
	switch {
	case plain(s):
		return s
	case fits(s, len(s)):
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

const maxQuoted = 1000 // characters of a stranger's text in a message

// Quote marks a stranger's text as such: it is put into double quotes, harmless as Clean
// makes it and at most a thousand characters long. A quote or a backslash in it is
// escaped, so that what follows the closing quote is ours.
func Quote(s string) string {
	return `"` + Clean(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s), maxQuoted) + `"`
}

// Word is Quote for a path or a name: without the quotes where it is a single word that
// needs none.
func Word(s string) string {
	if plain(s) && len(s) <= maxQuoted {
		return s
	}
	return Quote(s)
}

// plain reports whether s is a word of characters that mean nothing to a shell or a reader.
func plain(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@%+,=") == "" &&
		!strings.HasPrefix(s, "=")
}

// UnitName reports whether s is the name of a systemd unit (systemd.unit(5)) that can be an
// argument: of its alphabet, with a type, and not to be taken for an option.
func UnitName(s string) bool {
	dot := strings.LastIndexByte(s, '.')
	return len(s) <= 255 && dot > 0 &&
		slices.Contains([]string{"service", "scope", "socket", "mount", "slice", "target", "timer", "path"}, s[dot+1:]) &&
		strings.Trim(s, `abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\@`) == "" &&
		!strings.ContainsAny(s[:1], `-.\@:`)
}
