package bugreport

import (
	"context"
	"io"
	"strings"
	"testing"

	"csi-registrar/internal/sys/worker"
)

func TestInTimeOrder(t *testing.T) {
	const (
		first  = "2026-11-23T09:00:00.000001+0000 n kubelet[1]: one\n"
		second = "2026-11-23T09:00:00.000002+0000 n kubelet[1]: two\n    more of two\n"
		third  = "2026-11-23T10:00:00.000000+0000 n kubelet[1]: three\n"
	)
	for text, want := range map[string]string{
		third + second + first: first + second + third,
		first + second + third: first + second + third,
		second:                 second,
		"":                     "",
		"-- No entries --\n":   "-- No entries --\n",
	} {
		if got := inTimeOrder(text); got != want {
			t.Errorf("%q\nexpected %q", got, want)
		}
	}
}

// If there are too many entries, the newest are kept, and an error says so.
func TestNewestFirstKeepsTheNewest(t *testing.T) {
	newest := "2026-11-23T10:00:00 newest\n"
	part := Part{NewestFirst: true, Write: func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, newest+strings.Repeat("2026-11-23T09:00:00 older\n", maxPart/20))
		return err
	}}
	got, err := part.make(t.Context(), worker.NewPool())
	if err == nil || len(got) > maxPart || !strings.HasSuffix(got, newest) {
		t.Errorf("%d bytes, %v, the end is %q", len(got), err, got[max(len(got)-100, 0):])
	}
}
