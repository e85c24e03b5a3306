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
	*r.messages = append(*r.messages, rec.Message)
	return nil
}

func TestADriverHasSixtyEntriesAnHour(t *testing.T) {
	var messages []string
	log := limitDrivers(slog.New(recorder{&messages}))
	a, again, b := log.With("driver", "a"), log.With("driver", "a"), log.With("driver", "b")
	entry := func(log *slog.Logger, at time.Time, level slog.Level) {
		r := slog.NewRecord(at, level, "entry", 0)
		if err := log.Handler().Handle(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	for i := range 100 {
		at := now.Add(time.Duration(i) * time.Second)
		entry(a, at, slog.LevelInfo)
		entry(again, at, slog.LevelWarn)
	}
	if len(messages) != limitEntries || !strings.HasPrefix(messages[limitEntries-1], "too many entries") {
		t.Fatalf("%d entries, the last one %q", len(messages), messages[len(messages)-1])
	}
	entry(b, now, slog.LevelInfo)   // another driver
	entry(log, now, slog.LevelInfo) // none
	entry(a, now, slog.LevelDebug)  // whoever asks for all gets all
	if len(messages) != limitEntries+3 {
		t.Errorf("%d entries", len(messages))
	}
	entry(a, now.Add(limitWindow), slog.LevelInfo)
	if len(messages) != limitEntries+4 {
		t.Errorf("%d entries an hour later", len(messages))
	}
}
