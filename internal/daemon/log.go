package daemon

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/logqueue"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/systemd"
)

// Message IDs of the daemon's own entries; those of drivers are in internal/core/registrar.
// packaging/csi-registrar.catalog explains them all.
const (
	messageReady       = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c201"
	messageStopping    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c202"
	messageApplied     = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c203"
	messageConfigError = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c204"
)

// logger is the daemon's log.
type logger struct {
	*slog.Logger
	level   *slog.LevelVar
	queue   *logqueue.Queue
	refused chan struct{} // capacity one: nobody listens at journald's socket
}

// newLogger returns the configured log. Without a journal it logs text: this is no reason to lose
// registrations.
func newLogger(stderr io.Writer, c config.Log) logger {
	l := logger{level: &slog.LevelVar{}, refused: make(chan struct{}, 1)}
	_ = l.level.UnmarshalText([]byte(c.Level)) // config has checked it
	var failed error
	handler := func(sink logqueue.Sink) slog.Handler {
		if c.Format == "journal" || c.Format == "auto" && systemd.UnderJournal() {
			h, err := systemd.NewJournalHandler(systemd.JournalOptions{
				Level: l.level, Sink: sink, Stderr: stderr, Refused: func() { rate.Hint(l.refused) },
			})
			if err == nil {
				return h
			}
			failed = err
		}
		return newTextHandler(logqueue.Writer(sink, stderr), l.level, c.Format)
	}
	var h slog.Handler
	l.queue, h = logqueue.New(handler)
	l.Logger = slog.New(h)
	if failed != nil {
		l.Warn(`log.format: writing text to standard error; let systemd connect the journal, or set "text"`, "error", failed)
	}
	return l
}

// newTextHandler returns a handler for standard error.
func newTextHandler(w io.Writer, level slog.Leveler, format string) slog.Handler {
	opts := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.NewJSONHandler(w, opts)
	}
	opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == systemd.MessageID {
			return slog.Attr{} // for the journal's catalogue only
		}
		return a
	}
	return slog.NewTextHandler(w, opts)
}

// A driver that flaps for hours would hide the entries of the others, and journald would drop the
// daemon's: it has limitBurst entries at once, and then one in each limitInterval.
const (
	limitBurst    = 60
	limitInterval = time.Minute
)

// limitDrivers limits the entries of each logger with the attribute "driver", of which the agent
// makes one for each driver, from level info on. An entry after which others are left out has the
// attribute "limited".
func limitDrivers(log *slog.Logger) *slog.Logger {
	return slog.New(&limitHandler{Handler: log.Handler()})
}

type limitHandler struct {
	slog.Handler
	limit *limit // nil while there is no driver
}

type limit struct {
	sync.Mutex
	rate.Bucket
}

// WithAttrs implements slog.Handler.
func (h *limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	of := h.limit
	if slices.ContainsFunc(attrs, func(a slog.Attr) bool { return a.Key == "driver" }) {
		of = &limit{Bucket: rate.Bucket{Burst: limitBurst, Interval: limitInterval}}
	}
	return &limitHandler{h.Handler.WithAttrs(attrs), of}
}

// WithGroup implements slog.Handler.
func (h *limitHandler) WithGroup(name string) slog.Handler {
	return &limitHandler{h.Handler.WithGroup(name), h.limit}
}

// Handle implements slog.Handler.
func (h *limitHandler) Handle(ctx context.Context, r slog.Record) error {
	if h.limit != nil && r.Level >= slog.LevelInfo {
		h.limit.Lock()
		ok, next := h.limit.Allow(r.Time), h.limit.Next(r.Time)
		h.limit.Unlock()
		if !ok {
			return nil
		}
		if next.After(r.Time) {
			r.AddAttrs(slog.String("limited", "too many entries for this driver: the next ones are left out until "+next.UTC().Format(time.TimeOnly+" MST")))
		}
	}
	return h.Handler.Handle(ctx, r)
}
