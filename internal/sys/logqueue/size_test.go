package logqueue

import (
	"log/slog"
	"testing"
	"testing/synctest"
)

// TestShippedSize checks that the entries at the start of 1,000 drivers are not dropped while
// nobody reads, and that the entry is that of the time when it was logged.
func TestShippedSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{reads: make(chan struct{})}
		q, h := New(r.handler)
		const n = 4096
		for i := range n {
			slog.New(h).Info("e", "n", i)
		}
		close(r.reads)
		q.Close()
		if len(r.entries) != n || r.entries[0] != "msg=e n=0" || r.entries[n-1] != "msg=e n=4095" {
			t.Errorf("%d entries, from %q to %q", len(r.entries), r.entries[0], r.entries[len(r.entries)-1])
		}
	})
}
