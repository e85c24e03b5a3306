package logqueue

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// reader reads an entry for each token that it gets.
type reader struct {
	reads chan struct{}

	mu      sync.Mutex
	entries []string
}

// Write implements io.Writer.
func (r *reader) Write(p []byte) (int, error) {
	<-r.reads
	r.mu.Lock()
	defer r.mu.Unlock()
	r.entries = append(r.entries, strings.TrimSpace(string(p)))
	return len(p), nil
}

func (r *reader) handler(to Sink) slog.Handler {
	return slog.NewTextHandler(Writer(to, r), &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}})
}

// TestNobodyReads: logging does not wait, and one entry says how many are missing once somebody
// reads again, although nothing else is logged.
func TestNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{reads: make(chan struct{})}
		q, h := New(r.handler)
		log := slog.New(h)
		begun := time.Now()
		log.Info("e", "n", -1) // the one that is being written
		synctest.Wait()
		for n := range maxQueued + 7 {
			log.Info("e", "n", n)
		}
		if took := time.Since(begun); took != 0 {
			t.Errorf("logging waited for %s", took)
		}
		close(r.reads)
		synctest.Wait()
		if len(r.entries) != maxQueued+2 {
			t.Fatalf("%d entries, want %d", len(r.entries), maxQueued+2)
		}
		if want := `msg="entries of the log were dropped, because nobody read them" dropped=7`; r.entries[1] != want {
			t.Errorf("%s, want %s", r.entries[1], want)
		}
		for i, n := range []int{-1, 0, 1, 2} {
			at := min(i*2, i+1) // the second entry is the one about the dropped ones
			if want := fmt.Sprintf("msg=e n=%d", n); r.entries[at] != want {
				t.Errorf("entry %d: %s, want %s", at, r.entries[at], want)
			}
		}
		log.Info("last")
		q.Close()
		if got := r.entries[len(r.entries)-1]; got != "msg=last" {
			t.Errorf("Close lost the last entry: %s", got)
		}
	})
}

// TestCloseDoesNotWait: neither for a Write that ends with its context, nor for one that does not.
func TestCloseDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{reads: make(chan struct{})}
		q, h := New(r.handler)
		slog.New(h).Info("never read")
		begun := time.Now()
		q.Close()
		if took := time.Since(begun); took != 300*time.Millisecond {
			t.Errorf("Close took %s", took)
		}
		close(r.reads)

		var add Sink
		polite, _ := New(func(to Sink) slog.Handler {
			add = to
			return slog.NewTextHandler(io.Discard, nil)
		})
		begun = time.Now()
		add(func(ctx context.Context) { <-ctx.Done() })
		polite.Close()
		if took := time.Since(begun); took != 300*time.Millisecond {
			t.Errorf("Close took %s", took)
		}
		<-polite.ended
	})
}
