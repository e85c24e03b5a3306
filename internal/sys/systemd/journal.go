package systemd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
)

// identifier is the syslog identifier, for `journalctl -t`.
const identifier = "csi-registrar"

// MessageID is the key of the attribute that identifies the kind of entry: a 128-bit number in 32
// hexadecimal digits, under which the message catalog explains it.
const MessageID = "MESSAGE_ID"

// UnderJournal reports whether standard error is connected to the journal, so that the native
// protocol can be used instead (systemd's "automatic protocol upgrading", $JOURNAL_STREAM).
func UnderJournal() bool {
	ok, err := journal.StderrIsJournalStream()
	return err == nil && ok // systemd did not set an invalid variable
}

// NewJournalHandler returns a handler that writes entries of that level and above to the journal:
// the message with its attributes as text, and each attribute as a separate field, CSI_ and the key
// in capitals (CSI_DRIVER=). An attribute MESSAGE_ID keeps its name and is not in the text. Entries
// that the journal does not accept go to standard error.
func NewJournalHandler(level slog.Leveler) (slog.Handler, error) {
	if !journal.Enabled() {
		return nil, fmt.Errorf("cannot reach the journal at its socket below /run/systemd/journal")
	}
	return &journalHandler{
		level:    level,
		send:     journal.Send,
		fallback: slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}),
	}, nil
}

type journalHandler struct {
	level    slog.Leveler
	send     func(text string, priority journal.Priority, fields map[string]string) error
	fallback slog.Handler
	with     []func(slog.Handler) slog.Handler // the calls of WithAttrs and WithGroup
}

func (h *journalHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= h.level.Level()
}

// Handle uses a TextHandler to format the attributes, and collects the fields in its ReplaceAttr.
func (h *journalHandler) Handle(ctx context.Context, record slog.Record) error {
	fields := map[string]string{"SYSLOG_IDENTIFIER": identifier}
	builtin := 0 // how many of the next attributes are built in: the level and the message
	collect := func(groups []string, a slog.Attr) slog.Attr {
		switch {
		case builtin > 0:
			builtin--
			return slog.Attr{}
		case a.Key == MessageID:
			fields[MessageID] = a.Value.String()
			return slog.Attr{}
		}
		fields[fieldName(strings.Join(append(slices.Clip(groups), a.Key), "_"))] = a.Value.String()
		return a
	}
	var text strings.Builder
	handler := h.derive(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: collect}))
	builtin = 2
	attrs := record.Clone()
	attrs.Time = time.Time{} // it would be the third built-in attribute
	err := handler.Handle(ctx, attrs)
	if err == nil {
		err = h.send(strings.TrimSpace(record.Message+" "+text.String()), priority(record.Level), fields)
	}
	if err != nil {
		record.AddAttrs(slog.String("journal_error", err.Error()))
		return h.derive(h.fallback).Handle(ctx, record)
	}
	return nil
}

func (h *journalHandler) derive(to slog.Handler) slog.Handler {
	for _, with := range h.with {
		to = with(to)
	}
	return to
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return h.and(func(to slog.Handler) slog.Handler { return to.WithAttrs(attrs) })
}

func (h *journalHandler) WithGroup(name string) slog.Handler {
	return h.and(func(to slog.Handler) slog.Handler { return to.WithGroup(name) })
}

func (h *journalHandler) and(with func(slog.Handler) slog.Handler) slog.Handler {
	derived := *h
	derived.with = append(slices.Clip(h.with), with)
	return &derived
}

// fieldName returns the name of a field for a key: capitals, digits and _, at most 64 characters.
func fieldName(key string) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, "CSI_"+strings.ToUpper(key))
	return name[:min(len(name), 64)]
}

func priority(level slog.Level) journal.Priority {
	switch {
	case level >= slog.LevelError:
		return journal.PriErr
	case level >= slog.LevelWarn:
		return journal.PriWarning
	case level >= slog.LevelInfo:
		return journal.PriInfo
	}
	return journal.PriDebug
}
