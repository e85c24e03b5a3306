package bugreport

import (
	"context"
	"io"
	"strings"
	"testing"
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
		var got strings.Builder
		part := InTimeOrder(func(_ context.Context, w io.Writer) error { _, err := io.WriteString(w, text); return err })
		if err := part(t.Context(), &got); err != nil || got.String() != want {
			t.Errorf("%q, %v\nexpected %q", got.String(), err, want)
		}
	}
}

// If there are too many entries, the newest are kept.
func TestInTimeOrderKeepsTheNewest(t *testing.T) {
	newest := "2026-11-23T10:00:00 newest\n"
	var got strings.Builder
	part := InTimeOrder(func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, newest+strings.Repeat("2026-11-23T09:00:00 older\n", maxPart/20))
		return err
	})
	if err := part(t.Context(), &got); err != nil || got.Len() > maxPart || !strings.HasSuffix(got.String(), newest) {
		t.Errorf("%d bytes, %v, the end is %q", got.Len(), err, got.String()[max(got.Len()-100, 0):])
	}
}
