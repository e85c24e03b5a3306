package trace

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// maxSamples is how many durations of a method are kept. Of more a random sample is.
const maxSamples = 4096

// maxMethods bounds the summary; methods beyond it share a line.
const maxMethods = 100

const otherMethods = "(other methods)"

// methodStats is what the summary says of one method.
type methodStats struct {
	calls, errors int
	slowest       time.Duration
	sample        []time.Duration
}

// count adds a call to the summary.
func (r *Recorder) count(c *call) {
	name := c.Method
	if r.methods[name] == nil && len(r.methods) >= maxMethods {
		name = otherMethods
	}
	s := r.methods[name]
	if s == nil {
		s = &methodStats{}
		r.methods[name] = s
	}
	s.calls++
	if c.Code != "OK" {
		s.errors++
	}
	took := c.Duration()
	s.slowest = max(s.slowest, took)
	if len(s.sample) < maxSamples {
		s.sample = append(s.sample, took)
	} else if i := rand.N(s.calls); i < maxSamples {
		s.sample[i] = took
	}
}

// quantile is the smallest duration that at least a share q of the sample does not exceed.
func (s *methodStats) quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s.sample))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Summary returns the calls of each method, and how many are not in the record. Serve must have
// returned.
func (r *Recorder) Summary() string {
	var b strings.Builder
	if len(r.methods) == 0 {
		b.WriteString("no calls\n")
	} else {
		fmt.Fprintf(&b, "%-28s  %6s  %6s  %7s  %7s  %7s\n", "CALL", "CALLS", "ERRORS", "MEDIAN", "P99", "SLOWEST")
	}
	byName := func(a, b string) int { // without the service
		return cmp.Or(strings.Compare(Call{Method: a}.Name(), Call{Method: b}.Name()), strings.Compare(a, b))
	}
	for _, name := range slices.SortedFunc(maps.Keys(r.methods), byName) {
		s := r.methods[name]
		fmt.Fprintf(&b, "%-28s  %6d  %6d  %7s  %7s  %7s\n", safetext.Clean(Call{Method: name}.Name(), 28),
			s.calls, s.errors, round(s.quantile(0.5)), round(s.quantile(0.99)), round(s.slowest))
	}
	if r.dialFailures > 0 {
		fmt.Fprintf(&b, "the driver could not be reached by %s: %s\n",
			safetext.Count(r.dialFailures, "connection"), safetext.Clean(r.dialError.Error(), 500))
	}
	if r.notDecoded > 0 {
		fmt.Fprintf(&b, "left out: %s that could not be decoded; all bytes were copied\n",
			safetext.Count(r.notDecoded, "connection"))
	}
	if r.notWritten > 0 {
		fmt.Fprintf(&b, "left out: %s that could not be written fast enough\n", safetext.Count(r.notWritten, "line"))
	}
	return b.String()
}

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

// round formats a duration with three digits, in at most seven characters below an hour.
func round(d time.Duration) string {
	unit := time.Microsecond
	for d >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}
