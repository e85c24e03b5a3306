package bugreport

import (
	"slices"
	"strings"
)

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
