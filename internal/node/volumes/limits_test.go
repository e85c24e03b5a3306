package volumes

import (
	"strings"
	"testing"
)

// TestLargestFile checks that a vol_data.json of 64 KiB is read, and one with a byte more is an
// error.
func TestLargestFile(t *testing.T) {
	for extra, want := range map[int]int{0: 1, 1: 0} {
		x := newTree(t)
		dir := x.published("pod-1", "pv", "a.example", "v")
		text := data("a.example", "v")
		x.write(dir+"/vol_data.json", text+strings.Repeat(" ", 64<<10-len(text)+extra))
		all, err := x.read()
		if (err == nil) != (want == 1) {
			t.Errorf("%d bytes above the limit: %v", extra, err)
		}
		if got := counts(all)["a.example"].Published; got != want {
			t.Errorf("%d bytes above the limit: %d volumes, want %d", extra, got, want)
		}
	}
}

// TestMostNames checks that as many names as are allowed are read without an error.
func TestMostNames(t *testing.T) {
	x := newTree(t)
	for _, pod := range []string{"pod-1", "pod-2"} {
		x.mkdir("pods/" + pod)
	}
	for left, fails := range map[int]bool{1: true, 2: false} {
		r := &reader{left: left, mounts: map[string]bool{}}
		r.within(x.root+"/pods", func() { r.names(".") })
		if (r.err != nil) != fails {
			t.Errorf("two names with %d allowed: %v", left, r.err)
		}
	}
}
