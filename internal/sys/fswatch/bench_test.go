package fswatch

import (
	"os"
	"path/filepath"
	"testing"
)

// BenchmarkHint measures the time from the creation of a file, one of 100 that are watched, to the
// hint, and the same for its removal.
func BenchmarkHint(b *testing.B) {
	w := start(b)
	dir := tempDir(b)
	for i := range 100 {
		s := subscribe(b, w.Subscribe, filepath.Join(dir, string(rune('a'+i))))
		defer s.Close()
	}
	path := filepath.Join(dir, "x.sock")
	s := subscribe(b, w.Subscribe, path)
	defer s.Close()
	b.ReportAllocs()
	for b.Loop() {
		if err := os.Symlink("nowhere", path); err != nil {
			b.Fatal(err)
		}
		<-s.Hints()
		if err := os.Remove(path); err != nil {
			b.Fatal(err)
		}
		<-s.Hints()
	}
}
