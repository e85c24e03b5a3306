package daemon

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// recorder keeps the messages of what was logged.
type recorder struct{ messages *[]string }

func (recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r recorder) WithAttrs([]slog.Attr) slog.Handler     { return r }
func (r recorder) WithGroup(string) slog.Handler          { return r }
func (r recorder) Handle(_ context.Context, rec slog.Record) error {
	rec.Attrs(func(a slog.Attr) bool {
		rec.Message += " " + a.String()
		return true
	})
	*r.messages = append(*r.messages, rec.Message)
	return nil
}

func TestEntriesOfADriverAreLimited(t *testing.T) {
	var messages []string
	log := limitDrivers(slog.New(recorder{&messages}))
	a, b := log.With("driver", "a"), log.With("driver", "b")
	again := a.With("attempt", 2).WithGroup("g")
	entry := func(log *slog.Logger, at time.Time, level slog.Level) {
		r := slog.NewRecord(at, level, "entry", 0)
		if err := log.Handler().Handle(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	for range 100 {
		entry(a, now, slog.LevelInfo)
		entry(again, now, slog.LevelWarn)
	}
	if len(messages) != limitBurst || messages[limitBurst-2] != "entry" || !strings.HasPrefix(messages[limitBurst-1], "entry limited=too many entries") {
		t.Fatalf("%d entries, the last one %q", len(messages), messages[len(messages)-1])
	}
	entry(b, now, slog.LevelInfo)   // another driver
	entry(log, now, slog.LevelInfo) // none
	entry(a, now, slog.LevelDebug)  // whoever asks for all gets all
	if len(messages) != limitBurst+3 {
		t.Errorf("%d entries", len(messages))
	}
	for range 2 {
		entry(a, now.Add(limitInterval), slog.LevelInfo)
	}
	if len(messages) != limitBurst+4 || !strings.Contains(messages[limitBurst+3], "limited=") {
		t.Errorf("%d entries after the interval, the last one %q", len(messages), messages[len(messages)-1])
	}
}
