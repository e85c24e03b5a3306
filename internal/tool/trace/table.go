package trace

import (
	"fmt"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Table lays out calls for a terminal.
type Table struct {
	call, volume int // widths of columns
}

// The columns that have one width, with the spaces between all.
const fixedColumns = len("15:04:05") + len("TRY") + len("123.4ms") + len("DeadlineExceeded") + 5*2

// Widths of the other columns. On 80 columns they have the smallest ones.
const (
	minCall, maxCall     = 20, 28 // NodeGetCapabilities fits
	minVolume, maxVolume = 15, 44 // pvc- and a UUID fit
)

// NewTable fits a table into a width in columns, 80 at least.
func NewTable(columns int) Table {
	spare := max(columns-fixedColumns-minCall-minVolume, 0)
	t := Table{call: minCall, volume: min(minVolume+spare, maxVolume)}
	t.call = min(minCall+spare-(t.volume-minVolume), maxCall)
	return t
}

// Header is the first line.
func (t Table) Header() string {
	return t.row("TIME", "CALL", "VOLUME", "TRY", "TOOK", "CODE")
}

// Row is a call's line.
func (t Table) Row(c Call) string {
	code := c.Code
	if c.End != Answered {
		code = string(c.End)
	}
	volume := c.Volume
	if volume == "" {
		volume = "-"
	}
	return t.row(c.Time.Format(time.TimeOnly), safetext.Clean(c.Name(), t.call), safetext.Clean(volume, t.volume),
		fmt.Sprint(c.Attempt), round(c.Duration()), safetext.Clean(code, 16))
}

func (t Table) row(at, call, volume, try, took, code string) string {
	line := fmt.Sprintf("%-8s  %-*s  %-*s  %3s  %7s  %s", at, t.call, call, t.volume, volume, try, took, code)
	return strings.TrimRight(line, " ")
}

// Detail is the paragraph below a call's line, which is its error; empty: there is none.
func Detail(c Call) string { return safetext.Clean(c.Error, 2*maxShownText) }

// round writes a duration with three digits, in at most seven characters.
func round(d time.Duration) string {
	switch ms := float64(d) / float64(time.Millisecond); {
	case ms < 0.9995:
		return fmt.Sprintf("%.2fms", ms)
	case ms < 99.95:
		return fmt.Sprintf("%.3gms", ms)
	case ms < 999.5:
		return fmt.Sprintf("%.0fms", ms)
	case d < 100*time.Second:
		return fmt.Sprintf("%.3gs", d.Seconds())
	case d < 100*time.Minute:
		return d.Round(time.Second).String()
	}
	return d.Round(time.Minute).String()
}
