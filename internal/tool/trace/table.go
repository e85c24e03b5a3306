package trace

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Table lays out calls for a terminal.
type Table struct {
	call, volume int // widths of columns
}

// NewTable fits a table into a width in columns, 80 at least. NodeGetCapabilities fits into 80; the
// longest call, and a volume ID of pvc- and a UUID, into 120.
func NewTable(columns int) Table {
	spare := max(columns-80, 0)
	return Table{call: min(20+spare/4, 28), volume: min(16+spare-spare/4, 44)}
}

// Header returns the first line.
func (t Table) Header() string {
	return t.row("TIME", "CALL", "VOLUME", "TRY", "TOOK", "CODE")
}

// Row returns the line of a call.
func (t Table) Row(c Call) string {
	code := c.Code
	if c.End != Answered {
		code = string(c.End)
	}
	return t.row(c.Time.Format(time.TimeOnly), safetext.Clean(c.Name(), t.call), safetext.Clean(cmp.Or(c.Volume, "-"), t.volume),
		fmt.Sprint(c.Attempt), round(c.Duration()), safetext.Clean(code, 16))
}

func (t Table) row(at, call, volume, try, took, code string) string {
	line := fmt.Sprintf("%-8s  %-*s  %-*s  %3s  %7s  %s", at, t.call, call, t.volume, volume, try, took, code)
	return strings.TrimRight(line, " ")
}

// Detail returns the paragraph below a call's line, which is its error; empty: there is none.
func Detail(c Call) string { return safetext.Clean(c.Error, 2*maxShownText) }

// round formats a duration with three digits, in at most seven characters below an hour.
func round(d time.Duration) string {
	unit := time.Microsecond
	for d >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}
