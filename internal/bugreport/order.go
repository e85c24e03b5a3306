package bugreport

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
)

// InTimeOrder returns a part that puts the entries of a journal in chronological order: journalctl
// --grep prints the newest first, so that the limit of a part cuts off the oldest.
func InTimeOrder(part func(context.Context, io.Writer) error) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		var text bytes.Buffer
		err := part(ctx, &limited{w: &text, left: maxPart})
		if _, writeErr := io.WriteString(w, inTimeOrder(text.String())); err == nil {
			err = writeErr
		}
		return err
	}
}

// limited passes on a number of bytes, and drops the rest.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	if _, err := l.w.Write(p[:n]); err != nil {
		return 0, err
	}
	return len(p), nil
}

// inTimeOrder reverses entries that are in descending order. An entry begins with the time of
// short-iso-precise, which sorts as text; its other lines are indented.
func inTimeOrder(text string) string {
	var entries []string
	for line := range strings.Lines(text) {
		if len(entries) == 0 || !strings.HasPrefix(line, " ") && !strings.HasPrefix(line, "\t") {
			entries = append(entries, line)
		} else {
			entries[len(entries)-1] += line
		}
	}
	at := func(entry string) string { time, _, _ := strings.Cut(entry, " "); return time }
	if len(entries) > 1 && at(entries[0]) > at(entries[len(entries)-1]) {
		slices.Reverse(entries)
	}
	return strings.Join(entries, "")
}
