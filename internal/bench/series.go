package main

import (
	"fmt"
	"slices"
	"time"
)

// series is the same thing measured many times.
type series []time.Duration

// at is the value that the part p of all does not exceed.
func (s series) at(p float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(p*float64(len(s))), len(s)-1)].Round(time.Microsecond)
}

// print writes the row of a table.
func (s series) print(name string) {
	fmt.Printf("%-46s %12s %12s %12s  n=%d\n", name, ms(s.at(0.5)), ms(s.at(0.99)), ms(s.at(1)), len(s))
}

// compare writes the rows of both and their ratio.
func compare(name string, ours, peer series) {
	ours.print(name)
	if len(peer) > 0 {
		peer.print("  peer")
		fmt.Printf("%-46s %11.1fx\n", "  peer / ours", float64(peer.at(0.5))/float64(max(ours.at(0.5), 1)))
	}
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d)/1e6) }

// value writes a row of one number.
func value(name string, v float64, unit string) {
	fmt.Printf("%-46s %9.2f %s\n", name, v, unit)
}
