package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"csi-registrar/internal/sys/rate"
)

// A driver that flaps for hours would hide the entries of the others, and journald would drop the
// daemon's: it has limitBurst entries at once, and then one in each limitInterval.
const (
	limitBurst    = 60
	limitInterval = time.Minute
)

// limitDrivers limits the entries with the attribute "driver", separately for each driver, from
// level info on. An entry after which others are left out has the attribute "limited".
func limitDrivers(log *slog.Logger) *slog.Logger {
	return slog.New(&limitHandler{Handler: log.Handler(), limits: &limits{by: map[string]*rate.Bucket{}}})
}

// limits has a bucket for each driver that was ever configured.
type limits struct {
	mu sync.Mutex
	by map[string]*rate.Bucket
}

// allow counts an entry of the driver, reports whether it is logged, and returns when the next one
// would be.
func (l *limits) allow(driver string, now time.Time) (ok bool, next time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.by[driver]
	if b == nil {
		b = &rate.Bucket{Burst: limitBurst, Interval: limitInterval}
		l.by[driver] = b
	}
	ok = b.Allow(now)
	return ok, b.Next(now)
}

type limitHandler struct {
	slog.Handler
	limits *limits
	driver string // empty while there is none
}

// WithAttrs implements slog.Handler.
func (h *limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	driver := h.driver
	for _, a := range attrs {
		if a.Key == "driver" {
			driver = a.Value.String()
		}
	}
	return &limitHandler{h.Handler.WithAttrs(attrs), h.limits, driver}
}

// WithGroup implements slog.Handler.
func (h *limitHandler) WithGroup(name string) slog.Handler {
	return &limitHandler{h.Handler.WithGroup(name), h.limits, h.driver}
}

// Handle implements slog.Handler.
func (h *limitHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.driver != "" && r.Level >= slog.LevelInfo {
		ok, next := h.limits.allow(h.driver, r.Time)
		if !ok {
			return nil
		}
		if next.After(r.Time) {
			r.AddAttrs(slog.String("limited", "too many entries for this driver: the next ones are left out until "+next.UTC().Format(time.TimeOnly+" MST")))
		}
	}
	return h.Handler.Handle(ctx, r)
}
