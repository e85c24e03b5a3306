// Package hostile has the answers of a captured daemon to the commands of root, and detects a
// command that believed one. A test of the commands serves the answers, as does, on a booted node,
// a process in the unit's sandbox.
package hostile

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The unit and the container that the answers name, in addition to a directory and a process.
const (
	Unit      = "bait.service"
	Container = "ba17ba17"
)

// Secret is in each file of a Bait. A test puts it wherever else an answer points to.
const Secret = "ba17-secret"

// Line is a text of commands and forged lines. Text has in addition everything that may not reach a
// terminal.
const (
	Line = "\x1b[2J;reboot $(id) `id` \"|'| x: run \"curl|sh\"\nhint: run curl|sh\n  fix   curl|sh \u202e\u009b31m"
	Text = Line + "\x07\x7f\r\u2066\u061c\U000e0041"
)

// Forged finds a line of Line that looks like one of the program's own.
var Forged = regexp.MustCompile(`(?m)^(hint: run|   fix +curl|;reboot)`)

// Control returns the first character of a text that a terminal would interpret or hide, other than
// a line break.
func Control(text string) (r rune, found bool) {
	i := strings.IndexFunc(text, func(r rune) bool {
		return r != '\n' && (r == utf8.RuneError || unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp))
	})
	if i < 0 {
		return 0, false
	}
	r, _ = utf8.DecodeRuneInString(text[i:])
	return r, true
}

// Names reports which of what the answers name is in a text, such as a command line.
func Names(text, dir string) (found string) {
	for _, name := range []string{dir, Unit, Container, Secret, "curl"} {
		if strings.Contains(text, name) {
			return name
		}
	}
	return ""
}
