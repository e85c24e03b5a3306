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
	return slog.New(&limitHandler{Handler: log.Handler(), limits: &driverLimits{by: map[string]*window{}}})
}

// driverLimits has a window for each driver; there are as many as drivers were ever configured.
type driverLimits struct {
	mu sync.Mutex
	by map[string]*window
}

func (l *driverLimits) of(driver string) *window {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.by[driver]
	if w == nil {
		w = &window{}
		l.by[driver] = w
	}
	return w
}

type limitHandler struct {
	slog.Handler
	limits *driverLimits
	window *window // of the driver; nil while there is none
}

// WithAttrs implements slog.Handler.
func (h *limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	w := h.window
	for _, a := range attrs {
		if a.Key == "driver" {
			w = h.limits.of(a.Value.String())
		}
	}
	return &limitHandler{h.Handler.WithAttrs(attrs), h.limits, w}
}

// WithGroup implements slog.Handler.
func (h *limitHandler) WithGroup(name string) slog.Handler {
	return &limitHandler{h.Handler.WithGroup(name), h.limits, h.window}
}

// Handle implements slog.Handler.
func (h *limitHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.window == nil || r.Level < slog.LevelInfo {
		return h.Handler.Handle(ctx, r)
	}
	pass, until := h.window.take(r.Time)
	switch {
	case !pass:
		return nil
	case until.IsZero():
		return h.Handler.Handle(ctx, r)
	}
	last := slog.NewRecord(r.Time, slog.LevelWarn, "too many entries for this driver; the next ones are left out", r.PC)
	last.AddAttrs(slog.Time("until", until), slog.String("instead_of", r.Message))
	return h.Handler.Handle(ctx, last)
}

// window counts the entries of the last hour.
type window struct {
	mu    sync.Mutex
	times []time.Time // oldest first
}

// take reports whether an entry passes, and, if it is the last one that does, until when.
func (w *window) take(now time.Time) (pass bool, until time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.times) > 0 && now.Sub(w.times[0]) >= limitWindow {
		w.times = w.times[1:]
	}
	if len(w.times) >= limitEntries {
		return false, time.Time{}
	}
	w.times = append(w.times, now)
	if len(w.times) == limitEntries {
		return true, w.times[0].Add(limitWindow)
	}
	return true, time.Time{}
}
