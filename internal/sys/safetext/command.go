package safetext

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

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

// UnitName reports whether s is the name of a systemd unit (systemd.unit(5)) that can be an
// argument: it has only the characters of one, has a type, and cannot be read as an option.
func UnitName(s string) bool {
	dot := strings.LastIndexByte(s, '.')
	return len(s) <= 255 && dot > 0 &&
		slices.Contains([]string{"service", "scope", "socket", "mount", "slice", "target", "timer", "path"}, s[dot+1:]) &&
		strings.Trim(s, `abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\@`) == "" &&
		!strings.ContainsAny(s[:1], `-.\@:`)
}
