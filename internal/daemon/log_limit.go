package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Limits for the log entries of one driver. A driver that flaps for hours would hide the others,
// and journald would drop the daemon's entries.
const (
	limitEntries = 60
	limitWindow  = time.Hour
)

// limitDrivers limits the entries with the attribute "driver", separately for each driver, from
// level info on. The last entry before the limit announces that the next ones are left out.
func limitDrivers(log *slog.Logger) *slog.Logger {
	return slog.New(&limitHandler{Handler: log.Handler(), windows: &windows{by: map[string]*window{}}})
}

// windows has a window for each driver that was ever configured.
type windows struct {
	mu sync.Mutex
	by map[string]*window
}

type window struct {
	start   time.Time
	entries int
}

// add counts an entry of the driver.
func (w *windows) add(driver string, now time.Time) window {
	w.mu.Lock()
	defer w.mu.Unlock()
	if current := w.by[driver]; current == nil || now.Sub(current.start) >= limitWindow {
		w.by[driver] = &window{start: now}
	}
	w.by[driver].entries++
	return *w.by[driver]
}

type limitHandler struct {
	slog.Handler
	windows *windows
	driver  string // empty while there is none
}

// WithAttrs implements slog.Handler.
func (h *limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	driver := h.driver
	for _, a := range attrs {
		if a.Key == "driver" {
			driver = a.Value.String()
		}
	}
	return &limitHandler{h.Handler.WithAttrs(attrs), h.windows, driver}
}

// WithGroup implements slog.Handler.
func (h *limitHandler) WithGroup(name string) slog.Handler {
	return &limitHandler{h.Handler.WithGroup(name), h.windows, h.driver}
}

// Handle implements slog.Handler.
func (h *limitHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.driver != "" && r.Level >= slog.LevelInfo {
		switch w := h.windows.add(h.driver, r.Time); {
		case w.entries > limitEntries:
			return nil
		case w.entries == limitEntries:
			message := r.Message
			r = slog.NewRecord(r.Time, slog.LevelWarn, "too many entries for this driver; the next ones are left out", r.PC)
			r.AddAttrs(slog.Time("until", w.start.Add(limitWindow)), slog.String("instead_of", message))
		}
	}
	return h.Handler.Handle(ctx, r)
}
