package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// How many entries a driver may have in the log. What flaps for hours would drown the others,
// and journald would drop the daemon's entries.
const (
	limitEntries = 60
	limitWindow  = time.Hour
)

// limitDrivers limits what is logged with the attribute "driver", for each driver by itself,
// from level info on. The last entry that is let pass says so.
func limitDrivers(log *slog.Logger) *slog.Logger {
	return slog.New(&limitHandler{Handler: log.Handler(), windows: &windows{by: map[string]*window{}}})
}

// windows has one for each driver; there are as many as drivers were ever configured.
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
	if of := w.by[driver]; of == nil || now.Sub(of.start) >= limitWindow {
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
