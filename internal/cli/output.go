package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// writeJSON prints a JSON document; without an indent in one line.
func writeJSON(w io.Writer, v any, indent string) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", indent)
	return enc.Encode(v)
}

// terminalWidth returns the number of columns of w if it is a terminal.
func terminalWidth(w io.Writer) (columns int, ok bool) {
	file, ok := w.(*os.File)
	if !ok {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	return int(size.Col), true
}

// page describes standard output.
type page struct {
	columns int // the text is wrapped at this width where possible; at least 40
	colour  bool
}

// page describes standard output. Colour is only used on a terminal, unless NO_COLOR is set
// (https://no-color.org). The default width is 80 columns.
func (e *env) page() page {
	columns, tty := e.terminal(e.stdout)
	if columns <= 0 {
		columns, _ = strconv.Atoi(e.getenv("COLUMNS")) // 0 if it is not a number
	}
	if columns <= 0 {
		columns = 80
	}
	colour := tty && e.getenv("NO_COLOR") == "" && e.getenv("TERM") != "dumb"
	return page{max(columns, 40), colour}
}

// Colours as SGR parameters. They have the same length, so that coloured columns stay aligned.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	bold   = "01"
	dim    = "02"
)

func (p page) paint(colour, s string) string {
	if !p.colour || s == "" {
		return s
	}
	return "\x1b[" + colour + "m" + s + "\x1b[0m"
}

// hanging wraps text to the page's width. The first line follows label, which is indent columns
// wide; the other lines are indented by that.
func (p page) hanging(label string, indent int, text string) string {
	lines := wrap(text, max(p.columns-indent, 10))
	return strings.TrimRight(label+strings.Join(lines, "\n"+strings.Repeat(" ", indent)), " ") + "\n"
}

// wrap breaks s at spaces into lines of at most width characters. A longer word gets a line of its
// own and is not broken.
func wrap(s string, width int) []string {
	var lines []string
	room := 0 // what the last line has left
	for word := range strings.FieldsSeq(s) {
		n := utf8.RuneCountInString(word)
		if n >= room { // there is none for a space and the word
			lines, room = append(lines, word), width-n
			continue
		}
		lines[len(lines)-1] += " " + word
		room -= n + 1
	}
	return lines
}

// age formats a duration in its two largest units.
func age(d time.Duration) string {
	n, rest := max(int64(d/time.Second), 0), ""
	for _, unit := range []struct {
		name string
		next int64 // how many make one of the next unit
	}{{"s", 60}, {"m", 60}, {"h", 24}} {
		if n < unit.next {
			return fmt.Sprintf("%d%s%s", n, unit.name, rest)
		}
		if rest = ""; n%unit.next > 0 {
			rest = fmt.Sprintf("%d%s", n%unit.next, unit.name)
		}
		n /= unit.next
	}
	return fmt.Sprintf("%dd%s", n, rest)
}
