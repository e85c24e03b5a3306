package config

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Quote writes s as a TOML basic string of printable characters. (strconv.Quote uses
// escapes that TOML does not have.)
func Quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		case r > 0xffff:
			fmt.Fprintf(&b, `\U%08X`, r)
		default:
			fmt.Fprintf(&b, `\u%04X`, r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// printable leaves s as it is if it can be shown as it is, else quotes it.
func printable(s string) string {
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return Quote(s)
	}
	return s
}

// bare reports whether TOML takes s as a key without quotes.
func bare(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") == ""
}

// keyString writes a dotted key as TOML does. The name of a driver is always quoted, as
// the documents write it.
func keyString(parts ...string) string {
	out := make([]string, len(parts))
	for i, p := range parts {
		if bare(p) && !(i == 1 && parts[0] == "driver") {
			out[i] = p
		} else {
			out[i] = Quote(p)
		}
	}
	return strings.Join(out, ".")
}
