package daemon

import (
	"io"
	"log/slog"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/systemd"
)

// Message IDs of the daemon's own entries; those of drivers are in internal/core/registrar.
// packaging/csi-registrar.catalog explains them all.
const (
	messageReady       = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c201"
	messageStopping    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c202"
	messageApplied     = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c203"
	messageConfigError = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c204"
	messageTraceBegin  = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c205"
	messageTraceEnd    = "0f6d2d6a7c3b4a0e9f0b6e4f3a51c206"
)

// newLogger returns the configured logger, and its level. Without a journal it logs text: this is
// no reason to lose registrations.
func newLogger(stderr io.Writer, c config.Log) (*slog.Logger, *slog.LevelVar) {
	level := &slog.LevelVar{}
	level.Set(logLevel(c.Level))
	if c.Format == "journal" || c.Format == "auto" && systemd.UnderJournal() {
		h, err := systemd.NewJournalHandler(level)
		if err == nil {
			return slog.New(h), level
		}
		c.Format = "text"
		log, level := newLogger(stderr, c)
		log.Warn(`log.format: writing text to standard error; let systemd connect the journal, or set "text"`, "error", err)
		return log, level
	}
	opts := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(stderr, opts)), level
	}
	opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == systemd.MessageID {
			return slog.Attr{} // for the journal's catalogue only
		}
		return a
	}
	return slog.New(slog.NewTextHandler(stderr, opts)), level
}

func logLevel(name string) (level slog.Level) {
	_ = level.UnmarshalText([]byte(name)) // config has checked it
	return level
}
