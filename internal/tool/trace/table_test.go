package trace

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// example are calls whose table is compared whole.
func example() []Call {
	at := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	volume := "pvc-1f3c2b7a-9d1e-4c55-8c0e-2f1f8a1f7a10"
	return []Call{
		{Time: at, Method: "csi.v1.Node/NodeGetCapabilities", Attempt: 1, DurationMS: 0.412, End: Answered, Code: "OK"},
		{Time: at.Add(time.Second), Method: "csi.v1.Node/NodeStageVolume", Volume: volume, Attempt: 1, DurationMS: 5000, End: Running},
		{Time: at.Add(time.Second), Method: "csi.v1.Node/NodeStageVolume", Volume: volume, Attempt: 1, DurationMS: 119998, End: Cancelled},
		{Time: at.Add(2 * time.Minute), Method: "csi.v1.Node/NodeStageVolume", Volume: volume, Attempt: 12, DurationMS: 3.25, End: Answered, Code: "DeadlineExceeded"},
		{Time: at, Method: "csi.v1.Controller/ControllerUnpublishVolume\u202e", Volume: "\x00\u202ev", Attempt: 1, DurationMS: 99.95, End: Answered, Code: "OK"},
	}
}

func TestTable(t *testing.T) {
	for columns, want := range map[int]string{
		80: `TIME      CALL                  VOLUME            TRY     TOOK  CODE
12:00:00  NodeGetCapabilities   -                   1    412µs  OK
12:00:01  NodeStageVolume       pvc-1f3c2b7a-9d…    1       5s  running
12:00:01  NodeStageVolume       pvc-1f3c2b7a-9d…    1     2m0s  cancelled
12:02:00  NodeStageVolume       pvc-1f3c2b7a-9d…   12   3.25ms  DeadlineExceeded
12:00:00  ControllerUnpublish…  \x00\u202ev         1    100ms  OK
`,
		120: `TIME      CALL                          VOLUME                                        TRY     TOOK  CODE
12:00:00  NodeGetCapabilities           -                                               1    412µs  OK
12:00:01  NodeStageVolume               pvc-1f3c2b7a-9d1e-4c55-8c0e-2f1f8a1f7a10        1       5s  running
12:00:01  NodeStageVolume               pvc-1f3c2b7a-9d1e-4c55-8c0e-2f1f8a1f7a10        1     2m0s  cancelled
12:02:00  NodeStageVolume               pvc-1f3c2b7a-9d1e-4c55-8c0e-2f1f8a1f7a10       12   3.25ms  DeadlineExceeded
12:00:00  ControllerUnpublishVolume…    \x00\u202ev                                     1    100ms  OK
`,
	} {
		table := NewTable(columns)
		got := table.Header() + "\n"
		for _, c := range example() {
			got += table.Row(c) + "\n"
		}
		if got != want {
			t.Errorf("%d columns: got\n%s\nwant\n%s", columns, got, want)
		}
		for line := range strings.Lines(got) {
			if n := utf8.RuneCountInString(line) - 1; n > columns {
				t.Errorf("%d columns: %s", n, line)
			}
		}
	}
}

func TestSummary(t *testing.T) {
	rec := NewRecorder(nil)
	for _, c := range example() {
		if c.End != Running {
			rec.count(&call{Call: c})
		}
	}
	for i := range 1000 {
		rec.count(&call{Call: Call{Method: "csi.v1.Identity/Probe", DurationMS: float64(i + 1), End: Answered, Code: "OK"}})
	}
	for i := range 2 * maxMethods {
		rec.count(&call{Call: Call{Method: fmt.Sprintf("x.Y/Other%d", i), Code: "Unimplemented"}})
	}
	rec.dialFailed(os.ErrNotExist)
	rec.notDecoded, rec.notWritten = 2, 1
	lines := strings.Split(rec.Summary(), "\n")
	for _, want := range []string{
		"CALL                           CALLS  ERRORS   MEDIAN      P99  SLOWEST",
		"(other methods)                  104     104       0s       0s       0s",
		"ControllerUnpublishVolume…         1       0    100ms    100ms    100ms",
		"NodeStageVolume                    2       2     2m0s     2m0s     2m0s",
		"Probe                           1000       0    501ms    991ms       1s",
		"the driver could not be reached by 1 connection: file does not exist",
		"left out: 2 connections that could not be decoded; all bytes were copied",
		"left out: 1 line that could not be written fast enough",
	} {
		found := false
		for _, line := range lines {
			found = found || line == want
		}
		if !found {
			t.Errorf("no line %q in\n%s", want, strings.Join(lines, "\n"))
		}
	}
	if text := NewRecorder(nil).Summary(); text != "no calls\n" {
		t.Errorf("%q", text)
	}
}

// Of many calls the median is that of a sample, and the slowest is exact.
func TestSummaryOfManyCalls(t *testing.T) {
	rec := NewRecorder(nil)
	for i := range 100_000 {
		rec.count(&call{Call: Call{Method: "x.Y/Z", DurationMS: float64(i)}})
	}
	s := rec.methods["x.Y/Z"]
	if median := s.quantile(0.5); median < 45*time.Second || median > 55*time.Second || len(s.sample) != maxSamples || s.slowest != 99_999*time.Millisecond {
		t.Errorf("median %s, slowest %s, %d samples", median, s.slowest, len(s.sample))
	}
}

func TestDurations(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 412 * time.Microsecond: "412µs", 999600 * time.Nanosecond: "1ms", 12340 * time.Microsecond: "12.3ms",
		99960 * time.Microsecond: "100ms", 999600 * time.Microsecond: "1s", 12345 * time.Millisecond: "12.3s",
		119998 * time.Millisecond: "2m0s", 3599 * time.Second: "1h0m0s", 100 * time.Minute: "1h40m0s",
	} {
		if got := round(d); got != want || utf8.RuneCountInString(got) > 7 {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
}
